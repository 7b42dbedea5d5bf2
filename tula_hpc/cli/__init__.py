"""Open, run and preview a sweep for the commands."""
