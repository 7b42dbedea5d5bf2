"""Profile, plan and train large batches on Slurm: the cluster and batch size that best meet an objective.

Importing this package imports nothing heavy; torch is imported only by the rooms that run on the
nodes (`workloads`, `optim`, `checkpoint`, `profiler`, `trainer`).
"""

from tula_hpc.search_path import drop_working_directory, starts_a_command

__version__ = "0.1.0"

# before any other import: the folder in which somebody types a command may be a stranger's run
if starts_a_command():
    drop_working_directory()
