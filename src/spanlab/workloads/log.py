"""The workload `log`: requests of a server's own log, or of a recorded trace that comes with the code.

A reader leaves them in columns; what is selected of them gets token ids where it is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Tokens
from spanlab.workloads.corpus import Corpus, Row
from spanlab.workloads.logs import Ids, Log, LogSettings, read_log
from spanlab.workloads.logs.log import Columns
from spanlab.workloads.logs.ragpulse import CONTENT, entries
from spanlab.workloads.selection import Selection, refuse_cut, select
from spanlab.workloads.shape import committed
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Provenance, ProvenanceKind, Workload


@workload("log", "shape")
def measured(log: LogSettings, selection: Selection) -> Workload:
    """The committed shape of the RAGPulse trace, as the log that it was."""
    columns, shape = Columns(), committed("ragpulse", None)
    for number, entry in enumerate(entries(shape)):
        if number == log.requests:
            break
        columns.add(entry)
    return _workload(columns.log("ragpulse", Ids.CONTENT, None, (CONTENT,)), "RAGPulse trace", "measured shape")


@workload("log", "local")
def local(path: Path, log: LogSettings, selection: Selection, tokenizer: str | None = None) -> Workload:
    """A log of one of the formats of `logs`."""
    return _workload(read_log(path, log, tokenizer), path.name, "local trace")


def _workload(log: Log, name: str, kind: ProvenanceKind) -> Workload:
    means = {Ids.CHAINED: "chained ids", Ids.CONTENT: "content ids", Ids.NONE: "lengths only"}[log.ids]
    return Workload("log", (), Provenance(kind, f"{name}, {log.requests:,} requests as {log.format}, {means}"), log=log)


def served(workload: Workload, selection: Selection) -> Workload:
    """The selected requests with token ids, for studies that serve them; sessions are documents."""
    assert workload.log is not None, "a workload that was read from a log"
    refuse_cut("log", selection, "no limit on recorded prompts")
    return select(_corpus(workload.log, workload.provenance), selection)


class _Rows(Sequence[Row]):
    """The requests of a log at `whole`, made when they are asked for: as objects, the pieces of a long log fill GBs."""

    def __init__(self, log: Log, whole: NDArray[np.int64]) -> None:
        self._log, self._whole = log, whole
        self._groups = np.arange(log.requests) if log.sessions is None else log.sessions

    def __len__(self) -> int:
        return len(self._whole)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        log, number = self._log, int(self._whole[at])
        pieces = log.pieces[log.starts[number] : log.starts[number + 1]]
        return Row(int(self._groups[number]), tuple(pieces.tolist()), int(log.output_lens[number]))


def _corpus(log: Log, provenance: Provenance) -> Corpus:
    """Every content as a span of its own, with token ids from a counter; a prompt without tokens cannot be served."""
    longest = np.zeros(int(log.pieces.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, log.pieces, log.lengths)
    if longest.sum() > np.iinfo(np.int32).max:
        raise ValueError(f"log: {longest.sum():,} different tokens; expected fewer than 2^31 to serve them")
    first = np.cumsum(longest) - longest
    whole = np.flatnonzero(log.prompt_tokens)
    rows = _Rows(log, whole)
    lost = log.requests - len(whole)
    detail = f"{provenance.detail}; {lost:,} without a prompt are left out" if lost else provenance.detail
    independent = np.full(len(longest), log.ids == Ids.CONTENT)

    def expand(wanted: Mapping[int, int]) -> dict[int, Tokens]:
        return {one: np.arange(first[one], first[one] + count, dtype=np.int32) for one, count in wanted.items()}

    none = np.zeros(len(longest), dtype=bool)
    waits = None if log.waits_ns is None else log.waits_ns[whole].tolist()
    times = {"arrived_at": log.arrived_ns[whole].tolist(), "waits_ns": waits}
    return Corpus("log", provenance.kind, detail, longest, independent, none, rows, expand, **times)
