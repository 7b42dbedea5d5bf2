"""Watch the models, batches and steps of a training script that does not know of it."""
