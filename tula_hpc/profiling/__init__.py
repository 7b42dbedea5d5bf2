"""Run a profile job."""
