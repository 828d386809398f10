"""Opening of a log: compressed files, and pipes, which are copied once into a temporary file."""

from __future__ import annotations

import atexit
import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import select
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

STANDARD_INPUT = "-"
_COPIES = "SPANLAB_COPIED_PIPES"  # environment variable with the copies of pipes as JSON
_POLL_S = 2.0
_CHUNK = 1 << 20


class Waits(NamedTuple):
    """Limits of reading a pipe: seconds without data, and bytes."""

    wait_s: float = 60.0
    most_bytes: int = 1 << 36


class Content(NamedTuple):
    """Bytes of a log: the file that holds them, and their SHA-256 if they came through a pipe."""

    file: Path
    sha256: str | None = None


def content_of(path: Path, waits: Waits) -> Content:
    """Return the file or folder with the bytes of a log; a pipe, or `-` for standard input, is copied first.

    Raises ValueError if there is no such file, if it is a device, and if a pipe exceeds `waits`.
    """
    if is_pipe(path):
        return _copied(str(path), waits)
    if not path.exists():
        raise ValueError(f"log={path}: no such file; expected a log, or a folder of the RAGPulse trace")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"log={path}: expected a file, a folder, a pipe, or - for standard input")
    return Content(path)


def is_pipe(path: Path) -> bool:
    """Return whether a log comes through a pipe, which can be read only once."""
    return str(path) == STANDARD_INPUT or path.is_fifo() or str(path) in _copies()


def _copies() -> dict[str, list[str]]:
    """Return file and SHA-256 of each pipe that was copied, by its name; worker processes inherit them."""
    copies: dict[str, list[str]] = json.loads(os.environ.get(_COPIES, "{}"))
    return copies


def _copied(name: str, waits: Waits) -> Content:
    """Return the temporary file that holds the data of a pipe; it is removed when the program ends."""
    if name not in _copies():
        descriptor, file = tempfile.mkstemp(prefix="spanlab-log-")
        atexit.register(_remove, file, os.getpid())
        with os.fdopen(descriptor, "wb", buffering=0) as copy:
            digest = _copy(name, copy, waits)
        os.environ[_COPIES] = json.dumps(_copies() | {name: [file, digest]})
    file, digest = _copies()[name]
    return Content(Path(file), digest)


def _remove(file: str, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        Path(file).unlink(missing_ok=True)


def _copy(name: str, copy: IO[bytes], waits: Waits) -> str:
    """Copy the data of a pipe, and return its SHA-256."""
    digest, size = hashlib.sha256(), 0
    # Opening a pipe without a writer would block before any message.
    source = 0 if name == STANDARD_INPUT else os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while chunk := _next_chunk(source, name, waits.wait_s):
            digest.update(chunk)
            size += len(chunk)
            if size > waits.most_bytes:
                raise ValueError(
                    f"log={name}: expected at most {waits.most_bytes / (1 << 30):g} GiB from a pipe; "
                    "workload.log.pipe_gib=N allows more"
                )
            try:
                copy.write(chunk)
            except OSError as error:
                raise ValueError(
                    f"log={name}: expected room for its data in {tempfile.gettempdir()}, but {error.strerror}; TMPDIR "
                    "names another folder"
                ) from error
    finally:
        if source:
            os.close(source)
    return digest.hexdigest()


def _next_chunk(source: int, name: str, wait_s: float) -> bytes:
    """Return the next bytes of a pipe, empty at its end; ValueError if none come for `wait_s` seconds."""
    poll, waited = select.poll(), 0.0
    poll.register(source, select.POLLIN)
    while not poll.poll(min(_POLL_S, wait_s - waited) * 1e3):
        if not waited:
            print(f"log={name}: waits for data, up to {wait_s:g} s", file=sys.stderr, flush=True)
        waited += _POLL_S
        if waited >= wait_s:
            raise ValueError(
                f"log={name}: no data for {wait_s:g} s; expected a program that writes into this pipe, or "
                "workload.log.wait_s=N"
            )
    return os.read(source, _CHUNK)


def open_unpacked(path: Path) -> IO[bytes]:
    """Open a file, decompressed if it is compressed with gzip, bzip2, xz or zstd."""
    with path.open("rb") as file:
        start = file.read(6)
    unpack = next((unpack for magic, unpack in _UNPACK.items() if start.startswith(magic)), Path.open)
    return unpack(path, "rb")


def _open_zstd(path: Path, mode: str) -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


_UNPACK: dict[bytes, Callable[[Path, str], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}
