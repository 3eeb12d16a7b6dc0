"""python benchmarks/speed.py RECIPE ...: the same as python -m benchmarks.speed.measure RECIPE ..."""

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
runpy.run_module("benchmarks.speed.measure", run_name="__main__")
