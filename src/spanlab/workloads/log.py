"""The workload `log`: requests of a server's log, or of the recorded trace that is part of this package.

A log format reads the requests into columns. Selected requests get token ids when a study serves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from spanlab.core.token_string import Tokens
from spanlab.workloads.logs.formats import CONTENT, entries
from spanlab.workloads.logs.log import Columns, Ids, Log
from spanlab.workloads.logs.read import LogSettings, open_log, read_log
from spanlab.workloads.selection import Selection, refuse_length_limit, select
from spanlab.workloads.shape import committed
from spanlab.workloads.workload import Corpus, Provenance, ProvenanceKind, Row, Workload, workload


@workload("log", "shape")
def measured(log: LogSettings, selection: Selection) -> Workload:
    """Return the committed shape of the RAGPulse trace as a log."""
    columns, shape = Columns(), committed("ragpulse", None)
    for entry in islice(entries(shape), log.requests):
        columns.add(entry)
    return _workload(columns.log("ragpulse", Ids.CONTENT, None, (CONTENT,)), "RAGPulse trace", "measured shape")


@workload("log", "local")
def local(path: Path, log: LogSettings, selection: Selection, tokenizer: str | None = None) -> Workload:
    """Read a log in one of the formats of `logs`."""
    read = read_log(path, log, tokenizer)
    digest = open_log(path, log).sha256
    name = path.name if digest is None else f"{path} (a pipe, SHA-256 {digest[:16]}…)"
    return _workload(read, name, "local trace")


def _workload(log: Log, name: str, kind: ProvenanceKind) -> Workload:
    meaning_of_ids = {Ids.CHAINED: "chained ids", Ids.CONTENT: "content ids", Ids.NONE: "lengths only"}[log.ids]
    return Workload(
        "log", (), Provenance(kind, f"{name}, {log.requests:,} requests as {log.format}, {meaning_of_ids}"), log=log
    )


def served(workload: Workload, selection: Selection) -> Workload:
    """Return the selected requests of a log with token ids; its sessions count as documents."""
    assert workload.log is not None, "the workload was read from a log"
    refuse_length_limit("log", selection, "no limit on recorded prompts")
    return replace(select(_corpus(workload.log, workload.provenance), selection), notes=workload.log.notes)


class _Rows(Sequence[Row]):
    """Rows of the requests `numbers` of a log, made on access; as objects, the pieces of a long log take gigabytes."""

    def __init__(self, log: Log, numbers: NDArray[np.int64]) -> None:
        self._log, self._numbers = log, numbers
        self._groups = np.arange(log.requests) if log.sessions is None else log.sessions

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        log, number = self._log, int(self._numbers[index])
        pieces = log.pieces[log.starts[number] : log.starts[number + 1]]
        return Row(int(self._groups[number]), tuple(pieces.tolist()), int(log.output_lens[number]))


def _corpus(log: Log, provenance: Provenance) -> Corpus:
    """Return a corpus with one span per content and token ids from a counter; empty prompts are left out."""
    longest = np.zeros(int(log.pieces.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, log.pieces, log.lengths)
    if longest.sum() > np.iinfo(np.int32).max:
        raise ValueError(f"log: {longest.sum():,} different tokens; expected fewer than 2^31 to serve them")
    first = np.cumsum(longest) - longest
    with_tokens = np.flatnonzero(log.prompt_tokens)
    rows = _Rows(log, with_tokens)
    empty = log.requests - len(with_tokens)
    detail = f"{provenance.detail}; {empty:,} without a prompt are left out" if empty else provenance.detail
    independent = np.full(len(longest), log.ids == Ids.CONTENT)

    def expand(counts: Mapping[int, int]) -> dict[int, Tokens]:
        return {
            content: np.arange(first[content], first[content] + count, dtype=np.int32)
            for content, count in counts.items()
        }

    not_reusable = np.zeros(len(longest), dtype=bool)
    waits = None if log.waits_ns is None else log.waits_ns[with_tokens].tolist()
    times = {"arrived_at": log.arrived_ns[with_tokens].tolist(), "waits_ns": waits}
    return Corpus("log", provenance.kind, detail, longest, independent, not_reusable, rows, expand, **times)
