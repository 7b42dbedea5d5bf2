"""Save and restore a training."""
