"""Draw the time of a step: its breakdown, the model's error, and the speed of computing."""
