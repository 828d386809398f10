"""vLLM's retention of states in a hybrid model: the boundaries at which a request can resume, and an interval.

A repeated prompt computes its last token, so the last boundary at which it can resume is before that token. The
junction is the end of a shared prefix that has no state there. Source: vLLM 0.32.0, `MambaManager`, and
vllm-project/vllm#45845, #52216, where 0 became the default.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, PrefillInfo, Rule


@PLACEMENTS.register("retention")
def retention(interval: int | None = None, *, facts: ArmFacts) -> Rule:
    """`retention`: the last boundary, the junction and, with `interval`, one state per `interval` tokens."""
    unit = facts.unit

    def place(prefill: PrefillInfo) -> Sequence[int]:
        boundary = (prefill.prompt - 1) // unit * unit
        junction = min(prefill.matched // unit * unit, boundary)
        positions = {boundary, junction if junction > prefill.resume else 0}
        if interval is not None:
            positions.update(range(interval, prefill.prompt + 1, interval))
        return sorted(positions - {0})

    return Rule(place)
