"""Mapping of a workload's token ids into a model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanlab.core.request import Request, Tokens

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)


def remap_tokens(requests: Sequence[Request], vocab_size: int) -> list[Request]:
    """Return the requests with ids in [0, vocab_size); unchanged if all ids are already in range.

    Workloads from measured shapes number their tokens consecutively, so a plain remainder would give unrelated texts
    equal sequences; ids are hashed first. Equal ids stay equal, and spans that share an array still share one. Known
    outputs and options are mapped too.
    """
    spans = {id(span): span for request in requests for span in request.spans}
    texts = [
        *(span.tokens for span in spans.values()),
        *(request.output for request in requests if request.output is not None),
    ]
    texts += [option for request in requests for option in request.options]
    if all(len(tokens) == 0 or tokens.max() < vocab_size for tokens in texts):
        return list(requests)
    mapped = {key: replace(span, tokens=_map_ids(span.tokens, vocab_size)) for key, span in spans.items()}
    outputs = [None if request.output is None else _map_ids(request.output, vocab_size) for request in requests]
    return [
        replace(
            request,
            spans=tuple(mapped[id(span)] for span in request.spans),
            output=output,
            options=tuple(_map_ids(option, vocab_size) for option in request.options),
        )
        for request, output in zip(requests, outputs, strict=True)
    ]


def _map_ids(tokens: Tokens, vocab_size: int) -> Tokens:
    scattered = (tokens.astype(np.uint64) * _SPREAD) >> np.uint64(32)
    return (scattered % np.uint64(vocab_size)).astype(np.int32)
