"""Submit jobs, watch them and explain how they ended."""
