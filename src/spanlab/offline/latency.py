"""A proven lower bound on the mean TTFT of a run: the best use of its memory, and nobody waits.

A request that reuses x of its P prompt tokens needs T(x) >= max(C(x), M) from its arrival to its first token: C(x) is
the time to compute tokens [x, P) alone, M one step. C falls with x, and faster where more is reused, as late tokens see
more keys. What is saved, T(0) - T(x), is therefore at most C(0) - C(x) up to the x where C(x) reaches M, and constant
beyond. The largest sum of savings over reuses that fit the memory is bounded like the largest sum of tokens
(`packing`): within a node savings lie below their chord, for C(0) - C(x) is convex. So

    sum of TTFT >= sum of max(C(0), M) - that bound.

Queueing, decoding beside, chunks and loads only add to it. It is no estimate of what a server can reach under load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from spanlab.offline.bound import CacheMemory, resources_of
from spanlab.offline.forest import Ints
from spanlab.offline.packing import Gains
from spanlab.offline.pricing import INFINITE, LIMIT, Priced, priced
from spanlab.offline.reuses import Flags, Floats, Reuses


@dataclass(frozen=True)
class Prefill:
    """Prompts of a run by slot, and what their tokens cost.

    `prompt_tokens`  shape (n,)
    `counted`        whose TTFT counts
    `computing`      seconds of tokens `[start, stop)` by themselves
    `step_s`         seconds of the least step
    """

    prompt_tokens: Ints
    counted: Flags
    computing: Callable[[Ints, Ints], Floats]
    step_s: float

    def saved(self, reused: Ints, slot: Ints) -> Floats:
        """Seconds of computing that the first `reused` tokens of a slot's prompt save."""
        none, prompt = np.zeros_like(reused), self.prompt_tokens[slot]
        saved: Floats = self.computing(none, prompt) - self.computing(reused, prompt)
        return saved

    def enough(self, unit: int) -> Ints:
        """Tokens of each prompt, in units, behind which further reuse saves nothing, shape (n,)."""
        low, high = np.zeros_like(self.prompt_tokens), -(-self.prompt_tokens // unit)
        while (low < high).any():
            middle = (low + high) // 2
            start = np.minimum(middle * unit, self.prompt_tokens)
            done = self.computing(start, self.prompt_tokens) <= self.step_s
            low, high = np.where(done, low, np.minimum(middle + 1, high)), np.where(done, middle, high)
        return low * unit


def least_ttft(reuses: Reuses, memory: CacheMemory, prefill: Prefill) -> Priced:
    """Seconds of TTFT, summed over counted requests, below which no cache with this memory comes."""
    asked = prefill.prompt_tokens[prefill.counted]
    alone = np.maximum(prefill.computing(np.zeros_like(asked), asked), prefill.step_s)
    useful = _useful(reuses, prefill.enough(reuses.unit))
    if not len(useful.tokens):
        return Priced(float(alone.sum()), INFINITE)
    first_unit = useful.depth - useful.tokens + useful.unit
    gains = Gains(prefill.saved(useful.depth, useful.stop), prefill.saved(first_unit, useful.stop))
    saved = priced(useful, resources_of(reuses, memory), gains, LIMIT)
    return Priced(float(max(alone.sum() - saved.value, len(asked) * prefill.step_s)), saved.method)


def _useful(reuses: Reuses, enough: Ints) -> Reuses:
    """The reuses that save time: nodes up to the depth that is enough, the last of them cut there."""
    above, most = reuses.depth - reuses.tokens, enough[reuses.stop]
    kept = above < most
    depth = np.minimum(reuses.depth, most)[kept]
    rows = {name: getattr(reuses, name)[kept] for name in ("first", "stop", "path")}
    return replace(reuses, depth=depth, tokens=depth - above[kept], **rows)
