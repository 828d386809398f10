"""Tokenised text on disk, so that a text is tokenised once."""

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
    """SHA-256 of everything that determines the token ids: the text, its layout, the tokenizer, our versions."""
    digest = hashlib.sha256(f"{FORMAT_VERSION} {LAYOUT_VERSION} {name} {layout!r} {tokenizer_sha256}".encode())
    for document in documents:
        body = document.body.encode() if isinstance(document.body, str) else document.body.tobytes()
        asked = orjson.dumps([[q.text, q.options, q.answers] for q in document.questions])
        for content in (type(document.body).__name__.encode(), body, asked):
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def cached(cache_dir: Path | None, key: str, build: Callable[[], EncodedText]) -> EncodedText:
    """Read the entry of `key`, or build and store it; a broken entry is built anew. Without a folder, only build."""
    if cache_dir is None:
        return build()
    path = cache_dir / f"{key}.npz"
    if path.is_file():
        try:
            return _read(path)
        except BROKEN:
            path.unlink()
    text = build()
    _write(path, text)
    return text


def _write(path: Path, text: EncodedText) -> None:
    arrays = {
        "tokens": np.concatenate(text.spans),
        "lengths": np.array([len(span) for span in text.spans], dtype=np.int64),
        "independent": text.independent,
        "reusable": text.reusable,
        "rows": np.frombuffer(orjson.dumps(text.rows, default=tuple), dtype=np.uint8),
    }
    # numpy's stub reads arrays by name as options
    write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def _read(path: Path) -> EncodedText:
    with np.load(path, allow_pickle=False) as held:
        ends = np.cumsum(held["lengths"])
        tokens = held["tokens"]
        if ends[-1] != len(tokens):
            raise ValueError(f"{path.name} is inconsistent")
        rows = tuple(
            Row(group, tuple(spans), output_len, answer)
            for group, spans, output_len, answer in orjson.loads(held["rows"].tobytes())
        )
        return EncodedText(tuple(np.split(tokens, ends[:-1])), held["independent"], held["reusable"], rows)
