"""Draw the time of a step: its breakdown, and the model's error."""
