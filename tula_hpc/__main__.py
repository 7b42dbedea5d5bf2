"""`python -m tula_hpc COMMAND …`, as `tula COMMAND …`; with `-P` nothing of the working directory is imported."""

import sys

from tula_hpc.cli import main

if __name__ == "__main__":
    sys.exit(main())
