"""Write the files of a first sweep: a cluster file from Slurm's answers, a script's sweep file."""
