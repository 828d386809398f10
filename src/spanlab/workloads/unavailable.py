"""The error of a source that cannot be had, and the ways out that it names."""

from __future__ import annotations

from pathlib import Path

WAYS_OUT = "workload.source=shape, workload.source=local workload.path=..., or workload.source=hub with network"


class SourceUnavailable(ValueError):  # noqa: N818 - it names a state of the source
    """The text, its folder or its tokenizer is not here."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; the ways out are {WAYS_OUT}")


def existing_file(path: Path | None, key: str, expected: str) -> Path:
    """Return `path` if it is a file; raise SourceUnavailable, naming `key`, if it is absent or a folder."""
    if path is None:
        raise SourceUnavailable(f"{key} is not set; expected {expected}")
    if not path.is_file():
        raise SourceUnavailable(f"{key}={path} is not a file; expected {expected}")
    return path
