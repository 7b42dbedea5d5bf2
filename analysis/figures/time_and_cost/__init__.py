"""What candidates take and cost: over the global batch, and against each other."""
