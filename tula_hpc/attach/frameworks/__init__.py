"""Frameworks that train by a loop and checkpoints of their own."""
