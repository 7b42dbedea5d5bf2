"""Check a cluster before anything is trained there."""
