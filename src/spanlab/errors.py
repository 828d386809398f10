"""A user's mistake in one sentence: the key or file, its value, what was expected."""

from __future__ import annotations

import errno
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, is_dataclass
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from spanlab.checks import among
from spanlab.out_of_memory import out_of_memory

_THEIRS = (HydraException, OmegaConfBaseException, OSError, BrokenProcessPool, CancelledError)
USER_ERRORS = (ValueError, MemoryError, *_THEIRS)


def is_user_error(error: BaseException) -> bool:
    """Whether an error gets a sentence instead of a traceback."""
    return isinstance(error, USER_ERRORS) or (isinstance(error, RuntimeError) and _said_by_others(error) is not None)


def _said_by_others(error: RuntimeError) -> str | None:
    """The sentence of an error that has no class of its own: memory, and a launcher without its scheduler."""
    if "slurm cluster" in str(error):
        return f"hydra/launcher: expected a machine with Slurm ({_one_line(str(error))}); joblib runs jobs here"
    return None if out_of_memory(error) is None else _memory(error)


def sentence(mistake: BaseException, conf: Path) -> str:
    """One line about a mistake, never a traceback and never empty."""
    if isinstance(mistake, (MemoryError, RuntimeError)) and not isinstance(mistake, _THEIRS):
        said = _said_by_others(mistake) if isinstance(mistake, RuntimeError) else _memory(mistake)
        if said is not None:
            return said
    for error in _chain(mistake) if isinstance(mistake, _THEIRS) else []:
        if isinstance(error, OmegaConfBaseException) and not error.full_key:
            continue  # the same error from deeper inside, before OmegaConf knew the key
        for kinds, say in _SAYINGS:
            if isinstance(error, kinds):
                return say(error, conf)
    return _one_line(str(mistake)) or type(mistake).__name__


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what caused it, the cause first: it knows the key."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain[::-1]


def _unknown_key(error: BaseException, conf: Path) -> str:
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    schema, above = getattr(error, "object_type", None), getattr(error, "parent_node", None)
    names = [field.name for field in fields(schema)] if is_dataclass(schema) else []
    if not names and isinstance(above, DictConfig) and not above._is_none():
        names = [str(name) for name in above]
    known = f"; expected {among(str(getattr(error, 'key', key)), names)}" if names else ""
    return f"{key}: no such key{known}"


def _wrong_value(error: BaseException, conf: Path) -> str:
    key = getattr(error, "full_key", None)
    words = str(error).splitlines()[0]
    return f"{key}: {words}" if key else words


def _missing_value(error: BaseException, conf: Path) -> str:
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    return f"{key} is not set: give it on the command line as {key}=VALUE"


def _missing_config(error: BaseException, conf: Path) -> str:
    missing = getattr(error, "missing_cfg_file", None)
    if not missing:
        return _one_line(str(error))
    group, _, name = str(missing).rpartition("/")
    there = sorted(path.stem for path in (conf / group).glob("*.yaml") if path.stem != "config")
    where = f"{group}={name}" if group else f"entry {name}"
    return f"{where}: not in conf/{group}; expected {among(name, there)}"


def _system(error: BaseException, conf: Path) -> str:
    assert isinstance(error, OSError), "only the system's errors come here"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = error.filename or "while records were written"
        full = f"output.root: the disk is full, or a limit on it is reached ({where})"
        return f"{full}; expected room for a new run, earlier results are untouched"
    said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return _one_line(said) or type(error).__name__


def _broken(error: BaseException, conf: Path) -> str:
    return "workers: a worker process was killed, most likely for memory; expected a smaller workers=N or workload"


def _cancelled(error: BaseException, conf: Path) -> str:
    return "executor.address: the scheduler is gone; expected one that stays, and output.if_exists=resume goes on"


def _memory(error: BaseException) -> str:
    kept = "finished arms are kept, and output.if_exists=resume goes on"
    return f"memory ran out outside an arm ({out_of_memory(error)}); expected more memory or a smaller workload; {kept}"


def _one_line(words: str) -> str:
    return " ".join(words.split())


_SAYINGS = (
    ((ConfigAttributeError, ConfigKeyError), _unknown_key),
    (MissingMandatoryValue, _missing_value),
    (ValidationError, _wrong_value),
    (MissingConfigException, _missing_config),
    (BrokenProcessPool, _broken),
    (CancelledError, _cancelled),
    (OSError, _system),
)
