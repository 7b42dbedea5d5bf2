"""Read data sets and load them in batches."""
