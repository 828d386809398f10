"""Scripts of `benchmarks/hybrid_answers` import each other by name, as Python does for a script's folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "hybrid_answers"))
