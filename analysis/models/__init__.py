"""Fit step time, memory and noise to measurements."""
