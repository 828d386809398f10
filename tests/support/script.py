"""The installed console script."""

import sys
from pathlib import Path

SCRIPT = Path(sys.executable).parent / "spanlab"
