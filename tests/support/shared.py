"""Texts, traces and models that lie beside some checkouts and are no part of them."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared"
DATA, TRACES, MODELS = SHARED / "data", SHARED / "traces", SHARED / "models"


def needs(path: Path) -> pytest.MarkDecorator:
    """Skips a test where a file or folder is not there."""
    return pytest.mark.skipif(not path.exists(), reason=f"needs {path.relative_to(SHARED.parent)}")
