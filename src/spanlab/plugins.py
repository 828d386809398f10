"""Files and modules of a user's own that register policies, workloads, timing models, figures and the like."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

from spanlab.registry import forget


class _Loaded(NamedTuple):
    """A plugin of this process: its file, and a hash of it."""

    file: str
    contents: str


_loaded: dict[str, _Loaded] = {}


def located(name: str) -> str:
    """A plugin's name that means the same in every process: a file as its whole path, a module as it is."""
    return str(Path(name).resolve()) if _is_file(name) else name


def load_plugins(names: Iterable[str]) -> None:
    """Import these plugins, and forget all other files: a name may stand for another file in another study.

    A file that has not changed since stays. Modules stay for good: others may have imported them, and Python runs each
    once. Raises ValueError where a plugin fails.
    """
    wanted = {name: _found(name) for name in map(located, names)}
    for name, known in list(_loaded.items()):
        if name not in wanted or wanted[name][1] != known.contents:
            forget(known.file)
            del _loaded[name]
    for name, (spec, contents) in wanted.items():
        if not _is_file(name):
            _import(name)
        elif name not in _loaded:
            _run(name, spec)
            _loaded[name] = _Loaded(str(spec.origin), contents)


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each plugin's file, by its name: a run is made of what stands there."""
    return {name: _found(located(name))[1] for name in names}


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _module_name(file: str) -> str:
    """A name that no other plugin has, of the same file name or not."""
    return f"plugin_{Path(file).stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"


def _found(name: str) -> tuple[ModuleSpec, str]:
    """How to import a plugin, and a hash of its file."""
    expected = "expected a Python file, or a module that can be imported"
    try:
        spec = spec_from_file_location(_module_name(name), name) if _is_file(name) else find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"plugins={name}: no module of this name; {expected}")
        return spec, hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except (OSError, ImportError) as error:
        raise ValueError(f"plugins={name}: {error}; {expected}") from error


def _import(name: str) -> None:
    try:
        import_module(name)
    except Exception as error:  # a user's code may raise anything
        raise _failed(name, error) from error


def _run(name: str, spec: ModuleSpec) -> None:
    assert spec.loader is not None, "a file has a loader"
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's code may raise anything
        forget(str(spec.origin))
        del sys.modules[spec.name]
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> ValueError:
    """A plugin is a user's: whatever it raises is a mistake in it."""
    return ValueError(f"plugins={name}: {type(error).__name__}: {error}; expected a file that can be run")
