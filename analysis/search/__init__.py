"""Choose the configurations that a sweep measures next."""
