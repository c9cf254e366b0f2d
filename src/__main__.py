"""`python -m shardclip` is the command `shardclip`: what torchrun and srun start."""

import sys

from shardclip.cli import main

if __name__ == "__main__":
    sys.exit(main())
