"""Plugins: Python files and modules of users, which register policies, workloads, timing models or figures."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

from spanlab.registry import among, forget


class _Loaded(NamedTuple):
    """A plugin that this process has loaded: its file, and the hash of its contents."""

    file: str
    contents: str


_loaded: dict[str, _Loaded] = {}
_files: set[str] = set()  # of every plugin that this process has run, modules included


def located(name: str) -> str:
    """Return a name that is valid in every process: the absolute path of a file, or the name of a module."""
    return str(Path(name).resolve()) if _is_file(name) else name


def load_plugins(names: Iterable[str]) -> None:
    """Import these plugins and unregister all others: another study may use the same names for other files.

    An unchanged file stays loaded. A module stays loaded too: other modules may have imported it,
    and Python runs each module once. Raises ValueError if a plugin fails.
    """
    specs = {name: _find(name) for name in map(located, names)}
    for name, loaded in list(_loaded.items()):
        if name not in specs or specs[name][1] != loaded.contents:
            forget(loaded.file)
            del _loaded[name]
    for name, (spec, contents) in specs.items():
        _files.add(str(spec.origin))
        if not _is_file(name):
            try:
                import_module(name)
            except (Exception, SystemExit) as error:  # a user's code may raise anything
                raise _failed(name, error) from error
        elif name not in _loaded:
            _run(name, spec)
            _loaded[name] = _Loaded(str(spec.origin), contents)


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each plugin's file by name, for the provenance of a run."""
    return {name: _find(located(name))[1] for name in names}


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _module_name(file: str) -> str:
    """Return a module name that is unique, also among files with equal names."""
    return f"plugin_{Path(file).stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"


def _find(name: str) -> tuple[ModuleSpec, str]:
    """Return the import spec of a plugin, and the hash of its file."""
    expected = "expected a Python file, or a module that can be imported"
    try:
        spec = spec_from_file_location(_module_name(name), name) if _is_file(name) else find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"plugins={name}: no module of this name; {expected}")
        return spec, hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except (OSError, ImportError) as error:
        raise ValueError(f"plugins={name}: {error}; {expected}") from error


def _run(name: str, spec: ModuleSpec) -> None:
    assert spec.loader is not None, "a file has a loader"
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        forget(str(spec.origin))
        del sys.modules[spec.name]
        raise _failed(name, error) from error


#: Modules that plugins import, by their name in version 0.1 before files were merged.
MOVED = {
    "spanlab.checks": "spanlab.registry",
    "spanlab.core.cost": "spanlab.model_spec",
    "spanlab.core.recovery": "spanlab.core.rules",
    "spanlab.core.reuse": "spanlab.core.plan",
    "spanlab.core.eviction.contract": "spanlab.core.eviction",
    "spanlab.core.placement.contract": "spanlab.core.placement",
    "spanlab.models": "spanlab.model_files",
    "spanlab.report.cells": "spanlab.report.table",
    "spanlab.report.drawing": "spanlab.report.style",
    "spanlab.report.fields": "spanlab.report.table",
    "spanlab.report.measures": "spanlab.report.data",
    "spanlab.report.tables": "spanlab.report.table",
    "spanlab.report.units": "spanlab.report.table",
    "spanlab.settings.plan": "spanlab.settings.analyses",
    "spanlab.steady": "spanlab.stats",
    "spanlab.study.findings": "spanlab.analyses.base",
    "spanlab.workloads.corpus": "spanlab.workloads.workload",
    "spanlab.workloads.source": "spanlab.workloads.workload",
}


def _failed(name: str, error: BaseException) -> ValueError:
    """Return the user error for an exception that a plugin raised."""
    if isinstance(error, ImportError):
        for old, new in MOVED.items():
            # a folder of an earlier checkout, with its bytecode alone, can still be imported
            if f"{error.name}.".startswith(f"{old}."):
                return ValueError(f"plugins={name}: {old} has moved; expected an import from {new}")
    return ValueError(f"plugins={name}: {type(error).__name__}: {error}; expected a file that can be run")


class PluginError(ValueError):
    """Code of a plugin raised an error, or ended the program."""


@contextmanager
def named_errors() -> Iterator[None]:
    """Raise errors of plugins as PluginError with file and line; a user error gets them as a note."""
    try:
        yield
    except (Exception, SystemExit) as error:
        origin, location = _origin(error)
        if not location or isinstance(error, PluginError):
            raise
        if isinstance(error, (ValueError, OSError, MemoryError)):
            if not any("raised in" in note for note in getattr(error, "__notes__", ())):
                error.add_note(f"raised in {location}")
            raise
        raise PluginError(
            f"plugins={location}: {_described(origin)}; SPANLAB_TRACEBACK=1 shows the traceback"
        ) from error


def _origin(error: BaseException) -> tuple[BaseException, str]:
    """The first of an error's causes that passed a plugin, with file and line of the innermost call of the plugin.

    The location is empty where no plugin was called. The simulator's event loop raises a copy of an
    error, whose cause is the error itself.
    """
    if error.__cause__ is not None:
        origin, location = _origin(error.__cause__)
        if location:
            return origin, location
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return error, next((f"{file}:{line}" for file, line in reversed(lines) if file in _files), "")


def _described(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ended the program with {error.code!r}; expected a return value, or an error"
    names = [name for name in dir(error.obj) if name[0] != "_"] if isinstance(error, AttributeError) else []
    expected = f"; expected {among(str(error.name), names)}" if names and isinstance(error, AttributeError) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{expected}"
