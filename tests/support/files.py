"""Files that tests read."""

import json
from pathlib import Path


def write_lines(path: Path, *rows: object) -> Path:
    """Write rows as JSON lines, a text as it is; returns the path."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path
