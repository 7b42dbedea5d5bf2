"""Write the files of a first sweep: a cluster file by what Slurm says, a script's sweep file."""
