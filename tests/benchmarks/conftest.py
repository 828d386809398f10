"""Scripts of `benchmarks/` import each other by name, as Python does for a script's folder."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "hybrid_answers"), str(BENCHMARKS / "peers")]
