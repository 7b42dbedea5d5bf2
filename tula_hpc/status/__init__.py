"""Show what a run has done, its present jobs, and why they wait."""
