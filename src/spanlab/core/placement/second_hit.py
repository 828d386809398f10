"""States on demand: none before a second prompt shares the prefix, so that what is asked once costs no state.

Compare vLLM's junction (vllm-project/vllm#37898) and branch snapshots (NVIDIA/TensorRT-LLM#18272): they look at what is
stored, this rule at what was ever asked, so that a prefix which was evicted gets its state at the next sighting.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.placement.contract import PLACEMENTS, PrefillInfo, Rule


@PLACEMENTS.register("second_hit")
def second_hit(interval: int | None = None) -> Rule:
    """`second_hit`: where the prompt leaves all earlier ones and, with `interval`, at its multiples before that."""

    def positions(prefill: PrefillInfo) -> Sequence[int]:
        if prefill.seen <= prefill.resume:
            return ()
        between = () if interval is None else range(interval, prefill.seen, interval)
        return [*between, prefill.seen]

    return Rule(positions)
