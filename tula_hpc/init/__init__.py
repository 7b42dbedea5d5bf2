"""Write the files of a first sweep: a cluster file by Slurm's answers, a script's sweep file."""
