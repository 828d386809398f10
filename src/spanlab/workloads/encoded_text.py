"""Tokenised text in memory: the spans of a source with their token ids, and the rows that use them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Tokens
from spanlab.workloads.corpus import Corpus, Row, held_tokens
from spanlab.workloads.workload import ProvenanceKind


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
