"""Token ids that occur nowhere else in a workload."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spanlab.core.request import Request, Tokens


class FreshIds:
    """Counter of unused token ids from `first` up."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    @staticmethod
    def above(requests: Iterable[Request]) -> FreshIds:
        """Return a counter that starts above the largest token id of the requests."""
        spans = {id(span): span for request in requests for span in request.spans}
        return FreshIds(1 + max((int(span.tokens.max(initial=-1)) for span in spans.values()), default=-1))

    def take(self, count: int) -> Tokens:
        """Return the next ids, int32, shape (count,); ValueError if they exceed int32."""
        first, self._next = self._next, self._next + count
        if self._next > np.iinfo(np.int32).max:
            raise ValueError(f"workload: {self._next:,} token ids; expected fewer than 2^31 tokens")
        return np.arange(first, self._next, dtype=np.int32)
