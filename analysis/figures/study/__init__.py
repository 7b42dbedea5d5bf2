"""Draw what a study of methods found."""
