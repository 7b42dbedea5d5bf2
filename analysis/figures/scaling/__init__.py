"""Draw strong and weak scaling."""
