"""Watch a training script that knows nothing of it: its models, its batches, its steps."""
