"""Makes benchmarks/schedules.py, which holds the toy model and the simulation, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
