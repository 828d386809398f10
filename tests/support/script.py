"""The installed console script, and scripts that are no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(sys.executable).parent / "spanlab"
ROOT = Path(__file__).resolve().parents[2]


def docs_script(name: str) -> ModuleType:
    """Return a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
