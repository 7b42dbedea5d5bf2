"""Run a training job."""
