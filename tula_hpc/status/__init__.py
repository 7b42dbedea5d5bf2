"""Show what a run did, does and waits for."""
