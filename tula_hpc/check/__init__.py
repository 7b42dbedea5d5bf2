"""Check a cluster before anything is trained there."""

# number of nodes, and time limit, of the check's job
NODES = 2
MINUTES = 3
