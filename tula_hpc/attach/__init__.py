"""Training scripts of the user's own: watched, measured, scaled and resumed from outside."""
