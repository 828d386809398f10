"""spanlab: a laboratory for KV-cache reuse in LLM serving."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from spanlab.compiled import use_build

if TYPE_CHECKING:
    from spanlab.api import Result as Result
    from spanlab.api import load as load
    from spanlab.api import run as run

__all__ = ["Result", "__version__", "load", "run"]

use_build()  # before any module that may be compiled is imported


def __getattr__(name: str) -> object:
    """The Python API, imported when it is first used: every worker imports this package."""
    if name == "__version__":
        return version("spanlab")
    if name in __all__:
        return getattr(import_module("spanlab.api"), name)
    raise AttributeError(f"module spanlab has no attribute {name}")
