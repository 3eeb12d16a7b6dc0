"""accelerate launch scripts/fedtune.py RECIPE [section.key=value ...] [--dry-run]: the same as `fedllm run`."""

import sys

from fedllm.cli.commands import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
