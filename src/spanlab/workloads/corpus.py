"""What a source holds before anything is selected: distinct spans, and requests as rows of span numbers."""

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
    """One request as span numbers; `output_len` 0 means that nobody knows it."""

    group_id: int
    spans: tuple[int, ...]
    output_len: int = 0
    answer: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Spans and rows of one source, with token ids made only on demand.

    `detail`       provenance sentence in which `{documents}` and `{requests}` stand for the selected numbers.
    `lengths`      int64, shape (spans,); `independent` and `reusable` bool, shape (spans,).
    `expand`       maps {span: wanted tokens} to {span: its first wanted tokens}.
    `arrived_at`   integer nanoseconds of each row; None where the source knows no times.
    `waits_ns`     integer nanoseconds between each row and the end of the one before it in its group; None where the
                   source knows none.
    `joints`       finds what joins the parts of a prompt; None where the source knows no layout of prompts.
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


def held_tokens(spans: Sequence[Tokens]) -> Expand:
    """Make the `expand` of a corpus whose token ids lie in memory: views, never copies."""
    return lambda wanted: {span: spans[span][:length] for span, length in wanted.items()}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Spans (int32 token ids), their flags (bool, shape (spans,)) and the rows made of them."""

    spans: tuple[Tokens, ...]
    independent: NDArray[np.bool_]
    reusable: NDArray[np.bool_]
    rows: tuple[Row, ...]

    def corpus(self, name: str, kind: ProvenanceKind, detail: str) -> Corpus:
        """The same spans and rows, ready for selection."""
        lengths = np.array([len(span) for span in self.spans], dtype=np.int64)
        return Corpus(name, kind, detail, lengths, self.independent, self.reusable, self.rows, held_tokens(self.spans))
