"""Write the files of a first sweep: a cluster file from what Slurm says, and a script's sweep file."""
