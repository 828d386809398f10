"""A proven lower bound on the mean TTFT of a run: the best use of its memory, without queueing.

A request that reuses x of its P prompt tokens needs T(x) >= max(C(x), M) from its arrival to its first token: C(x) is
the time to compute tokens [x, P) alone, M one step. Times are whole nanoseconds: the time to compute is rounded down,
so C(x) = that time before rounding, less one. C falls with x, and faster for larger x, as late tokens attend to
more keys. The saving T(0) - T(x) is therefore at most C(0) - C(x) up to the x where C(x) reaches M, and constant
beyond. The largest sum of savings over reuses that fit the memory is bounded like the largest sum of tokens
(`packing`): within a node savings lie below their chord, because C(0) - C(x) is convex. So

    sum of TTFT >= sum of max(C(0), M) - that bound,

rounded up to a whole number. A request without useful reuse takes the rounded time itself instead of C(0).
Queueing, concurrent decoding, chunks and loads only increase TTFT. The bound does not estimate TTFT under load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from spanlab.offline.bound import CacheMemory, resources_of
from spanlab.offline.forest import Ints
from spanlab.offline.packing import Gains
from spanlab.offline.pricing import INFINITE, LIMIT, PricedBound, bound_gain
from spanlab.offline.reuses import Flags, Floats, Reuses

NS = 1e-9
ERROR = 1e-12  # of sums in float64, relative to the sum of all times


@dataclass(frozen=True)
class Prefill:
    """Prompts of a run by slot, and the time to compute their tokens.

    `prompt_tokens`  shape (n,)
    `counted`        whether the TTFT of a slot's request counts
    `computing`      nanoseconds to compute tokens `[start, stop)` alone, before they are rounded down
    `step_ns`        nanoseconds of the shortest step
    """

    prompt_tokens: Ints
    counted: Flags
    computing: Callable[[Ints, Ints], Floats]
    step_ns: int

    def saved(self, reused: Ints, slot: Ints) -> Floats:
        """Return the seconds saved by reuse of the first `reused` tokens of a slot's prompt."""
        none, prompt = np.zeros_like(reused), self.prompt_tokens[slot]
        saved: Floats = self.computing(none, prompt) - self.computing(reused, prompt)
        return saved * NS

    def useful_tokens(self, unit: int) -> Ints:
        """Return the tokens of each prompt, in whole units, beyond which reuse saves no time, shape (n,)."""
        low, high = np.zeros_like(self.prompt_tokens), -(-self.prompt_tokens // unit)
        while (low < high).any():
            middle = (low + high) // 2
            start = np.minimum(middle * unit, self.prompt_tokens)
            fits_step = self.computing(start, self.prompt_tokens) - 1 <= self.step_ns
            low, high = np.where(fits_step, low, np.minimum(middle + 1, high)), np.where(fits_step, middle, high)
        return low * unit


def least_ttft(reuses: Reuses, memory: CacheMemory, prefill: Prefill) -> PricedBound:
    """Return a lower bound on TTFT in whole nanoseconds, summed over counted requests, for any cache of this memory."""
    useful = _useful(reuses, prefill.useful_tokens(reuses.unit))
    computing = prefill.computing(np.zeros_like(prefill.prompt_tokens), prefill.prompt_tokens)
    saves = np.zeros(len(computing), np.bool_)
    saves[useful.stop] = True
    alone = np.maximum(np.where(saves, computing - 1, np.floor(computing)), prefill.step_ns)[prefill.counted]
    if not len(useful.tokens):
        return PricedBound(int(alone.sum()), INFINITE)
    first_unit = useful.depth - useful.tokens + useful.unit
    gains = Gains(prefill.saved(useful.depth, useful.stop), prefill.saved(first_unit, useful.stop))
    saved = bound_gain(useful, resources_of(reuses, memory), gains, LIMIT)
    total = alone.sum() * (1 - ERROR) - saved.value / NS
    return PricedBound(max(ceil(total), len(alone) * prefill.step_ns), saved.method)


def _useful(reuses: Reuses, useful_tokens: Ints) -> Reuses:
    """Return the reuses that save time: nodes up to the useful depth, with the last one truncated there."""
    above, limit = reuses.depth - reuses.tokens, useful_tokens[reuses.stop]
    saves = above < limit
    depth = np.minimum(reuses.depth, limit)[saves]
    rows = {name: getattr(reuses, name)[saves] for name in ("first", "stop", "path")}
    return replace(reuses, depth=depth, tokens=depth - above[saves], **rows)
