"""Disk cache of tokenised text."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import orjson

from spanlab.workloads.corpus import EncodedText, Row
from spanlab.workloads.files import write_atomically
from spanlab.workloads.prompts import LAYOUT_VERSION, Document, Layout, PassagesLayout

FORMAT_VERSION = 1
BROKEN = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def cache_key(name: str, documents: Sequence[Document], layout: Layout | PassagesLayout, tokenizer_sha256: str) -> str:
    """Return the SHA-256 of all inputs of tokenisation: text, layout, tokenizer, and versions of format and layout."""
    digest = hashlib.sha256(f"{FORMAT_VERSION} {LAYOUT_VERSION} {name} {layout!r} {tokenizer_sha256}".encode())
    for document in documents:
        body = document.body.encode() if isinstance(document.body, str) else document.body.tobytes()
        question_bytes = orjson.dumps([[q.text, q.options, q.answers] for q in document.questions])
        for content in (type(document.body).__name__.encode(), body, question_bytes):
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def load_or_build(cache_dir: Path | None, key: str, build: Callable[[], EncodedText]) -> EncodedText:
    """Read the entry of `key`, or build and store it.

    A broken entry is rebuilt. Without a folder, the text is built and not stored.
    """
    if cache_dir is None:
        return build()
    path = cache_dir / f"{key}.npz"
    if path.is_file():
        try:
            return _read_entry(path)
        except BROKEN:
            path.unlink()
    text = build()
    _write_entry(path, text)
    return text


def _write_entry(path: Path, text: EncodedText) -> None:
    arrays = {
        "tokens": np.concatenate(text.spans),
        "lengths": np.array([len(span) for span in text.spans], dtype=np.int64),
        "independent": text.independent,
        "reusable": text.reusable,
        "rows": np.frombuffer(orjson.dumps(text.rows, default=tuple), dtype=np.uint8),
    }
    # numpy's stub reads arrays by name as options
    write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def _read_entry(path: Path) -> EncodedText:
    with np.load(path, allow_pickle=False) as arrays:
        ends = np.cumsum(arrays["lengths"])
        tokens = arrays["tokens"]
        if ends[-1] != len(tokens):
            raise ValueError(f"{path.name} is inconsistent")
        rows = tuple(
            Row(group, tuple(spans), output_len, answer)
            for group, spans, output_len, answer in orjson.loads(arrays["rows"].tobytes())
        )
        return EncodedText(tuple(np.split(tokens, ends[:-1])), arrays["independent"], arrays["reusable"], rows)
