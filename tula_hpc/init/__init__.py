"""Write a cluster file for the cluster that this login node belongs to."""
