"""Profile, plan and train with large batches on Slurm.

Importing this package imports nothing heavy: only modules that run on the nodes import torch.
"""

import sys

# an older Python runs this file and would fail at the next import: nothing here is newer than 2.7
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        "tula_hpc needs Python 3.11 or newer; this is "
        + sys.version.split()[0]
        + " ("
        + sys.executable
        + "): use the tula of the environment that has tula_hpc, such as .venv/bin/tula"
    )

from tula_hpc.python_path import drop_working_directory, refuse_without_libraries, starts_a_command

__version__ = "0.1.0"

# before any other import: somebody may type a command in a folder that is a stranger's run
if starts_a_command():
    drop_working_directory()
    refuse_without_libraries()
