"""Draw the time and cost of candidates, over the global batch and against each other."""
