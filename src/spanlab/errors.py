"""User errors as one sentence: the key or file, its value, and what was expected."""

from __future__ import annotations

import errno
import sys
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from spanlab.compiled import CONF
from spanlab.registry import among

# ------------------------------------------------------------------------------
# The error of an exhausted pool, and recognition of out-of-memory errors of libraries.
# ------------------------------------------------------------------------------


class OutOfMemoryError(ValueError):
    """A preallocated pool has fewer free pages or slots than a step needs."""


#: Exceptions to catch where memory may run out; `out_of_memory` tells them from other errors.
CAUGHT = (MemoryError, RuntimeError, ImportError, OutOfMemoryError)

# torch has an error class for GPU memory only, and the simulator's environment cannot import it.
_PHRASES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "can't start new thread",  # its stack has no room
    "failed to map segment",  # of a shared library
)


def out_of_memory(error: BaseException) -> str | None:
    """Return the message of an out-of-memory error in one line; None for any other error."""
    text = " ".join(str(error).split())
    if not isinstance(error, (MemoryError, OutOfMemoryError)) and not any(
        phrase in text.lower() for phrase in _PHRASES
    ):
        return None
    # the first two sentences: allocators append advice about their settings
    return "; ".join(text.rstrip(".").split(". ")[:2]) or "no more memory"


_LIBRARY_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    OSError,
    BrokenProcessPool,
    CancelledError,
)
_OFTEN_MEMORY = (RuntimeError, ImportError)  # user errors where their text is about memory
USER_ERRORS = (ValueError, MemoryError, *_LIBRARY_ERRORS)


def is_user_error(error: BaseException) -> bool:
    """Return whether an error is reported as a sentence instead of a traceback."""
    return isinstance(error, USER_ERRORS) or (
        isinstance(error, _OFTEN_MEMORY) and _runtime_error(error) is not None
    )


def _runtime_error(error: BaseException) -> str | None:
    """Return the sentence of an error about memory or about a launcher without its scheduler; else
    None."""
    if "slurm cluster" in str(error):
        return f"hydra/launcher: expected a machine with Slurm ({_one_line(str(error))}); joblib runs jobs here"
    return None if out_of_memory(error) is None else _memory(error)


def sentence(mistake: BaseException) -> str:
    """Return one line about a user error with its notes, never empty."""
    return with_notes(_sentence(mistake), mistake)


def with_notes(text: str, error: BaseException) -> str:
    """Append the notes of an error, such as what was published in spite of it."""
    return "; ".join([text, *map(_one_line, getattr(error, "__notes__", ()))])


def _sentence(mistake: BaseException) -> str:
    if isinstance(mistake, (MemoryError, *_OFTEN_MEMORY)) and not isinstance(
        mistake, _LIBRARY_ERRORS
    ):
        text = _memory(mistake) if isinstance(mistake, MemoryError) else _runtime_error(mistake)
        if text is not None:
            return text
    # an error and its causes, the root cause last: only it has the key
    chain: list[BaseException] = []
    cause: BaseException | None = mistake if isinstance(mistake, _LIBRARY_ERRORS) else None
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for error in reversed(chain):
        if isinstance(error, OmegaConfBaseException) and not error.full_key:
            continue  # the same error, before OmegaConf added the key
        for kinds, describe in _SENTENCES:
            if isinstance(error, kinds):
                return describe(error)
    return _one_line(str(mistake)) or type(mistake).__name__


def _unknown_key(error: BaseException) -> str:
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    schema, parent = getattr(error, "object_type", None), getattr(error, "parent_node", None)
    names = [field.name for field in fields(schema)] if is_dataclass(schema) else []
    short = getattr(schema, "short_names", {})
    if key in short:
        return f"{key}: a short name, for the command line; expected in a file {' > '.join(short[key].split('.'))}"
    names += short
    if not names and isinstance(parent, DictConfig) and not parent._is_none():
        names = [str(name) for name in parent]
    expected = f"; expected {among(str(getattr(error, 'key', key)), names)}" if names else ""
    return f"{key}: no such key{expected}"


def _wrong_value(error: BaseException) -> str:
    key = getattr(error, "full_key", None)
    reason = str(error).splitlines()[0]
    return f"{key}: {reason}" if key else reason


def _missing_value(error: BaseException) -> str:
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    return f"{key} is not set: give it on the command line as {key}=VALUE"


#: Provider, in Hydra's store, of the choices that need no file of conf/.
CHOICES = "choices"

#: Entries of earlier versions, and the scripts that have taken their place.
MOVED_ENTRIES = {
    name: f"benchmarks/hybrid_answers/{name}.py"
    for name in ("train_probe", "hybrid_answers", "tail_replay")
}


def _missing_config(error: BaseException) -> str:
    missing = getattr(error, "missing_cfg_file", None)
    if not missing:
        return _one_line(str(error))
    group, _, name = str(missing).rpartition("/")
    if not group and name in MOVED_ENTRIES:
        return f"entry {name}: now a script; expected .venvs/engine/bin/python {MOVED_ENTRIES[name]} KEY=VALUE ..."
    files = (path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "config")
    # the choices that need no file; of an empty group: entries
    stored: Any = ConfigStore.instance().repo
    nodes = (stored.get(group, {}) if group else stored).items()
    stored_names = (
        file.removesuffix(".yaml")
        for file, node in nodes
        if getattr(node, "provider", "") == CHOICES
    )
    choices = sorted({*files, *stored_names})
    choice = f"{group}={name}" if group else f"entry {name}"
    return f"{choice}: not in conf/{group}; expected {among(name, choices)}"


def _system(error: BaseException) -> str:
    assert isinstance(error, OSError), "this function formats operating system errors"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        file = error.filename or "while records were written"
        full = f"output.root: the disk is full, or a limit on it is reached ({file})"
        return f"{full}; expected room for a new run, earlier results are untouched"
    text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return _one_line(text) or type(error).__name__


def _memory(error: BaseException) -> str:
    resume = "finished arms are kept, and output.if_exists=resume goes on"
    cause = f"memory ran out outside an arm ({out_of_memory(error)})"
    return f"{cause}; expected more memory or a smaller workload; {resume}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


_SENTENCES = (
    ((ConfigAttributeError, ConfigKeyError), _unknown_key),
    (MissingMandatoryValue, _missing_value),
    (OmegaConfBaseException, _wrong_value),
    (MissingConfigException, _missing_config),
    (
        BrokenProcessPool,
        lambda error: (
            "workers: a worker process was killed, most likely for memory; "
            "expected a smaller workers=N or workload"
        ),
    ),
    (
        CancelledError,
        lambda error: (
            "executor.address: the scheduler is gone; "
            "expected one that stays, and output.if_exists=resume goes on"
        ),
    ),
    (OSError, _system),
)


def warn(text: str) -> None:
    """Print one line on stderr, if it can be written."""
    with suppress(OSError, ValueError):
        print(f"spanlab: {text}", file=sys.stderr)
