"""Profile, plan and train large batches on Slurm: the cluster and batch size that best meet an objective.

Importing this package imports nothing heavy; torch is imported only by the rooms that run on the nodes
(`workloads`, `optim`, `checkpoint`, `profiler`, `trainer`).
"""

__version__ = "0.1.0"
