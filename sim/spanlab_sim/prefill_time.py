"""The time to compute a part of a prompt alone, by a timing model, in as many steps as the batch rules need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from spanlab.core.batch_rules import BatchRules
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.step_features import StepFeatures
from spanlab.model_spec import causal_pairs
from spanlab_sim.timing import TimingModel

TOKENS = 1 << 20  # the longest length at which loading is compared with computing


class PrefillTime:
    """Nanoseconds of each step that computes prompt tokens [start, stop) while nothing else runs."""

    def __init__(self, timing: TimingModel, batch: BatchRules, rules: ReuseRules) -> None:
        """`batch` cuts the tokens into steps; `rules` are the policy's."""
        self._timing, self._rules = timing, rules
        self._chunk = batch.max_num_batched_tokens if batch.enable_chunked_prefill else TOKENS
        self._steps = lru_cache(1 << 14)(self._compute)  # a waiting request is evaluated repeatedly

    def __call__(self, start: int, stop: int) -> tuple[int, ...]:
        return self._steps(start, stop)

    def _compute(self, start: int, stop: int) -> tuple[int, ...]:
        chunks = [(first, min(first + self._chunk, stop)) for first in range(start, stop, self._chunk)]
        return tuple([self._timing.step(self._features(*chunk, stop)) for chunk in chunks])

    def _features(self, start: int, stop: int, end: int) -> StepFeatures:
        scans = -(-(stop - start) // self._rules.grid) if self._rules.needs_states else 0
        return StepFeatures(
            prefill_tokens=stop - start,
            prefill_pairs=causal_pairs(start, stop),
            num_prefills=1,
            num_first_tokens=int(stop == end),
            prefill_context=start,
            num_forwards=1,
            scan_runs=int(self._rules.needs_states),
            scan_chunks=scans,
        )


def break_even_tokens(ready_ns: Callable[[int], int], steps: PrefillTime, unit: int) -> int | None:
    """Return the length from which a prefix is ready sooner if it is loaded than if it is computed.

    `ready_ns`  nanoseconds until one token behind a loaded prefix of so many tokens is computed
    `unit`      lengths are multiples of it

    None where loading is not faster for any length up to TOKENS. Between lengths that double, one change is
    assumed.
    """

    def pays(units: int) -> bool:
        return ready_ns(units * unit) < sum(steps(0, units * unit + 1))

    lengths = [1 << power for power in range((TOKENS // unit).bit_length())]
    first = len(lengths)
    while first and pays(lengths[first - 1]):
        first -= 1
    if first == len(lengths):
        return None
    below, length = lengths[first - 1] if first else 0, lengths[first]
    return unit * (below + 1 + bisect_left(range(below + 1, length), True, key=pays))
