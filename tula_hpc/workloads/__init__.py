"""Build models, criteria and optimizers by name, and estimate their memory."""
