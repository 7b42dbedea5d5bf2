"""Train with a script of the user's own: its processes, its progress, its exact resume."""
