"""python -m fedllm: the `fedllm` command, for launchers that start modules."""

import sys

from fedllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
