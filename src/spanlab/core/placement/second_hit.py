"""States on demand: none before a second prompt shares the prefix, so that a prefix used once costs no state.

Compare vLLM's junction (vllm-project/vllm#37898) and branch snapshots (NVIDIA/TensorRT-LLM#18272). They depend on the
stored prefix; this rule depends on all earlier prompts, so that an evicted prefix gets its state at the next use.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.placement.contract import PLACEMENTS, PrefillInfo, Rule


@PLACEMENTS.register("second_hit")
def second_hit(interval: int | None = None) -> Rule:
    """`second_hit`: where the prompt diverges from all earlier ones and, with `interval`, at multiples before."""

    def place(prefill: PrefillInfo) -> Sequence[int]:
        if prefill.seen <= prefill.resume:
            return ()
        between = () if interval is None else range(interval, prefill.seen, interval)
        return [*between, prefill.seen]

    return Rule(place)
