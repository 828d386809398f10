"""Corpus: all distinct spans of a source, and its requests as rows of span numbers, before selection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Tokens
from spanlab.workloads.joints import FindJoints
from spanlab.workloads.workload import ProvenanceKind

Expand = Callable[[Mapping[int, int]], dict[int, Tokens]]


class Row(NamedTuple):
    """One request as span numbers; `output_len` 0 means unknown."""

    group_id: int
    spans: tuple[int, ...]
    output_len: int = 0
    answer: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Spans and rows of one source, with token ids made only on demand.

    `detail`       provenance sentence with placeholders `{documents}` and `{requests}` for the selected counts.
    `lengths`      int64, shape (spans,); `independent` and `reusable` bool, shape (spans,).
    `expand`       maps {span: number of tokens} to {span: its first tokens, as many as requested}.
    `arrived_at`   arrival of each row in integer nanoseconds; None if the source has no times.
    `waits_ns`     integer nanoseconds between each row and the end of the previous row of its group; None if the
                   source has none.
    `joints`       returns the joints of the prompt layout; None if the source has no prompt layout.
    """

    name: str
    kind: ProvenanceKind
    detail: str
    lengths: NDArray[np.int64]
    independent: NDArray[np.bool_]
    reusable: NDArray[np.bool_]
    rows: Sequence[Row]
    expand: Expand
    arrived_at: Sequence[int] | None = None
    waits_ns: Sequence[int] | None = None
    joints: FindJoints | None = None


def expand_views(spans: Sequence[Tokens]) -> Expand:
    """Return the `expand` function of a corpus in memory; it returns views, without copies."""
    return lambda lengths: {span: spans[span][:length] for span, length in lengths.items()}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Spans (int32 token ids), their flags (bool, shape (spans,)) and the rows made of them."""

    spans: tuple[Tokens, ...]
    independent: NDArray[np.bool_]
    reusable: NDArray[np.bool_]
    rows: tuple[Row, ...]

    def corpus(self, name: str, kind: ProvenanceKind, detail: str) -> Corpus:
        """Return a corpus of these spans and rows."""
        lengths = np.array([len(span) for span in self.spans], dtype=np.int64)
        return Corpus(name, kind, detail, lengths, self.independent, self.reusable, self.rows, expand_views(self.spans))
