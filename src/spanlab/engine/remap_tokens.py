"""Token ids of a workload as ids that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanlab.core.request import Request, Tokens

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbours land far apart (Knuth, TAOCP 3, 6.4)


def remap_tokens(requests: Sequence[Request], vocab_size: int) -> list[Request]:
    """The same requests with ids in [0, vocab_size); unchanged where all of them are already.

    Measured shapes count their tokens instead of naming them, so that a remainder would make unrelated texts run
    parallel; ids are scattered first. Equal ids stay equal, and spans that were one array stay one. Known outputs and
    options go with the prompts.
    """
    spans = {id(span): span for request in requests for span in request.spans}
    texts = [*(span.tokens for span in spans.values()), *(one.output for one in requests if one.output is not None)]
    texts += [option for request in requests for option in request.options]
    if all(len(tokens) == 0 or tokens.max() < vocab_size for tokens in texts):
        return list(requests)
    fitted = {key: replace(span, tokens=_fit(span.tokens, vocab_size)) for key, span in spans.items()}
    outputs = [None if request.output is None else _fit(request.output, vocab_size) for request in requests]
    return [
        replace(
            request,
            spans=tuple(fitted[id(span)] for span in request.spans),
            output=output,
            options=tuple(_fit(option, vocab_size) for option in request.options),
        )
        for request, output in zip(requests, outputs, strict=True)
    ]


def _fit(tokens: Tokens, vocab_size: int) -> Tokens:
    scattered = (tokens.astype(np.uint64) * _SPREAD) >> np.uint64(32)
    return (scattered % np.uint64(vocab_size)).astype(np.int32)
