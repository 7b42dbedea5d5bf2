"""Measure gradients: norms, noise scale, reference."""
