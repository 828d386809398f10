"""Token ids of a workload as ids that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanlab.core.request import Request, Span

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbours land far apart (Knuth, TAOCP 3, 6.4)


def remap_tokens(requests: Sequence[Request], vocab_size: int) -> list[Request]:
    """The same requests with ids in [0, vocab_size); unchanged where all of them are already.

    Measured shapes count their tokens instead of naming them, so that a remainder would make unrelated texts run
    parallel; ids are scattered first. Equal ids stay equal, and spans that were one array stay one.
    """
    spans = {id(span): span for request in requests for span in request.spans}
    if all(len(span.tokens) == 0 or span.tokens.max() < vocab_size for span in spans.values()):
        return list(requests)
    fitted = {key: replace(span, tokens=_fit(span, vocab_size)) for key, span in spans.items()}
    return [replace(request, spans=tuple(fitted[id(span)] for span in request.spans)) for request in requests]


def _fit(span: Span, vocab_size: int) -> np.ndarray:
    scattered = (span.tokens.astype(np.uint64) * _SPREAD) >> np.uint64(32)
    return (scattered % np.uint64(vocab_size)).astype(np.int32)
