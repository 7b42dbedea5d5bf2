"""Show the work of a run so far, its present jobs, and the reasons for their waiting."""
