"""Hostile settings: keys of a schema with invalid values, and a process for each, with a time limit."""

import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

DIGITS = "1" + 400 * "0"
#: Values as on the command line: numbers out of range, other types, nesting, interpolations, characters.
VALUES = (
    *(
        "-1",
        "0",
        "1",
        "1.5",
        "-0.0",
        "nan",
        "inf",
        "-inf",
        "1e-320",
        "1e300",
        "9223372036854775808",
        DIGITS,
        f"-{DIGITS}",
    ),
    *("true", "null", "nope", "''", "'\u00e9\u202e'", "'a b'", "???", "[]", "[1]", "[[1]]", "[nope]", "[null]", "{}"),
    *(
        "{a:1}",
        "{a:{b:{c:1}}}",
        "[{}]",
        "${oc.env:HOME}",
        "${oc.env:NOT_SET_ANYWHERE}",
        "${seeds}",
        "${nope}",
        "${",
        "a=b",
    ),
    *(f"{60 * '['}{60 * ']'}", f"'{2000 * 'x'}'", "/dev/null", "'\\x1b[31m'", "1_000", "0x10", "1e5", "2026-01-01"),
)


@dataclass(frozen=True)
class Key:
    """A dotted key of a schema; `section`: it has keys below; `optional`: it may be null."""

    name: str
    hint: Any
    section: bool
    optional: bool


def keys_of(schema: type[Any], names: dict[str, str], prefix: str = "") -> Iterator[Key]:
    """Yield all keys of a schema; `names` has one name for each key that holds sections by name, as arms."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        below = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
        yield Key(key, hint, bool(below), NoneType in get_args(hint))
        if below and get_origin(hint) is not dict:
            yield from keys_of(below[0], names, f"{key}.")
        elif below and key in names:
            yield from keys_of(below[0], names, f"{key}.{names[key]}.")


def forbidden(key: Key) -> list[str]:
    """Return values that no key of this type takes: other types, not finite, out of range, negative, unknown names.

    Settings have no negative numbers, and lists of text hold names, except for plugins, sweeps, commands and patterns.
    """
    kind = next(kind for kind in (*get_args(key.hint), key.hint) if kind is not NoneType)
    kind = key.hint if get_origin(key.hint) is list else kind
    free = key.name.rpartition(".")[2] in ("command", "keep")
    of_lists = {int: ["[-1]", "[1.5]"], float: ["[-1]", "[nan]", "[1e300]"], str: [] if free else ["[nope]"]}
    match get_origin(kind) or kind:
        case builtin if key.section or builtin is dict:
            return ["1", "nope", "[1]"]
        case builtin if builtin is list:
            return ["{a:1}", "[[1]]", "[null]", *of_lists.get(get_args(kind)[0], [])]
        case builtin if builtin is bool:
            return ["-1", "2", "nope", "[]"]
        case builtin if builtin is int:
            return ["-1", "1.5", "true", "nope", "9223372036854775808", DIGITS]
        case builtin if builtin is float:
            is_share = key.name.endswith(("share", "fraction"))
            return ["-1", "nan", "-inf", "true", "nope", "1e300", "1e-320", *(["1.5"] if is_share else [])]
        case builtin if builtin is str:
            return ["[]", "{a:1}"]
    return []


def hostile(keys: list[Key], count: int, seed: int) -> list[str]:
    """Draw overrides: a key with a hostile value, sometimes misspelled, added, deleted or given as a section."""
    draw = random.Random(seed)
    overrides = []
    for _ in range(count):
        key, value = draw.choice(keys).name, draw.choice(VALUES)
        match draw.random():
            case chance if chance < 0.8:
                overrides.append(f"{key}={value}")
            case chance if chance < 0.85:
                overrides.append(f"+{key}={value}")
            case chance if chance < 0.88:
                overrides.append(f"~{key}")
            case chance if chance < 0.92:
                at = draw.randrange(len(key))
                overrides.append(f"{key[:at]}{key[at + 1 :]}={value}")
            case chance if chance < 0.96 and "." in key:
                section, _, last = key.rpartition(".")
                overrides.append(f"{section}={{{last}:{value}}}")
            case _:
                overrides.append(f"{key}.0={value}")
    return overrides


@dataclass(frozen=True)
class Ended:
    """Result of a call: exit code, output, and whether the time limit ended it."""

    code: int
    text: str
    late: bool

    @property
    def fault(self) -> str:
        """traceback, hang, signal, silence or wordy; empty: accepted, or refused in one sentence."""
        lines = [line for line in self.text.splitlines() if line.startswith("spanlab: ")]
        if self.late:
            return "hang"
        if "Traceback (most recent call last)" in self.text:
            return "traceback"
        if self.code < 0:
            return "signal"
        if self.code and (not lines or len(lines[-1]) < 12):
            return "silence"
        return "wordy" if self.code and len(self.text.splitlines()) > 4 else ""


def forked(call: Callable[[], object], limit_s: float = 10.0, memory_gib: float = 4.0) -> Ended:
    """Run a call in a fork of this process, in a new session, and end it after `limit_s` seconds."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if not child:
            _in_child(call, out.fileno(), memory_gib)
        late, until = False, time.monotonic() + limit_s
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until and not late:
                late = True
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.002)
        out.seek(0)
        return Ended(os.waitstatus_to_exitcode(done[1]), out.read().decode(errors="replace"), late)


def _in_child(call: Callable[[], object], out: int, memory_gib: float) -> None:
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0), os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        limit = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        call()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
