"""Profile, plan and train with large batches on Slurm.

Importing this package imports nothing heavy: only modules that run on the nodes import torch.
"""

from tula_hpc.search_path import drop_working_directory, starts_a_command

__version__ = "0.1.0"

# before any other import: somebody may type a command in a folder that is a stranger's run
if starts_a_command():
    drop_working_directory()
