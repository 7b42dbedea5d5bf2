"""Start of the follower; see `follow`."""

import sys

from tula_hpc.tracking.follow import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
