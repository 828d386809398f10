"""Placements that are functions of the lengths of one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, PrefillInfo, Rule


@PLACEMENTS.register("none")
def no_states() -> Rule:
    """`none`: no states; only KV is stored."""
    return Rule(lambda prefill: ())


@PLACEMENTS.register("block")
def every_n(interval: int) -> Rule:
    """`block`: every `interval` tokens."""
    return Rule(lambda prefill: range(interval, prefill.prompt + 1, interval))


def balanced_positions(prompt: int, count: int) -> range:
    """Return the first `count` multiples of prompt // (count + 1) within the prompt."""
    step = max(1, prompt // (count + 1))
    return range(step, min(prompt, step * count) + 1, step)


@PLACEMENTS.register("balanced")
def balanced(count: int) -> Rule:
    """`balanced`: `count` states at equal distances."""
    return Rule(lambda prefill: balanced_positions(prefill.prompt, count))


@PLACEMENTS.register("sqrt")
def square_root() -> Rule:
    """`sqrt`: every floor(sqrt(prompt)) tokens."""
    return Rule(lambda prefill: range(math.isqrt(prefill.prompt), prefill.prompt + 1, math.isqrt(prefill.prompt)))


@PLACEMENTS.register("log")
def powers_of_two(least: int = 768) -> Rule:
    """`log`: the powers of two from `least` on."""
    first = 1 << (least - 1).bit_length()
    return Rule(lambda prefill: [first << k for k in range(max(0, (prefill.prompt // first).bit_length()))])


@PLACEMENTS.register("last")
def last() -> Rule:
    """`last`: one state, at the prompt's end."""
    return Rule(lambda prefill: (prefill.prompt,))


@PLACEMENTS.register("tail")
def tail(count: int, offset: int | None = None, *, facts: ArmFacts) -> Rule:
    """`tail`: `count` states at offset · 2^k tokens before the prompt's end, k = 0 … count - 1.

    `offset`  None: the model's grid
    """
    distances = [(offset or facts.grid) << k for k in reversed(range(count))]
    return Rule(lambda prefill: [prefill.prompt - distance for distance in distances if distance < prefill.prompt])


@PLACEMENTS.register("boundary")
def boundary() -> Rule:
    """`boundary`: at the ends of the spans that the workload marks as reusable."""
    return Rule(lambda prefill: prefill.boundaries)


@PLACEMENTS.register("branch")
def branch() -> Rule:
    """`branch`: at the end of the stored prefix, beyond its last state, where other prompts may diverge too."""
    return Rule(lambda prefill: (prefill.matched,) if prefill.matched > prefill.resume else ())


@PLACEMENTS.register("branch_else_last")
def branch_else_last(*, facts: ArmFacts) -> Rule:
    """`branch_else_last`: one state at the end of the stored prefix or, if that has a state, at the prompt's end.

    A match ends before the prompt's last token. Source: state tracking of SGLang 0.5.23.
    """

    grid = facts.unit

    def positions(prefill: PrefillInfo) -> tuple[int]:
        branch = min(prefill.matched, prefill.prompt - 1) // grid * grid
        return (branch,) if branch > prefill.resume else (prefill.prompt,)

    return Rule(positions)


@PLACEMENTS.register("retention")
def retention(interval: int | None = None, *, facts: ArmFacts) -> Rule:
    """`retention`: the last boundary, the junction and, with `interval`, one state per `interval` tokens.

    A repeated prompt computes its last token, so the last boundary at which it can resume is before that token. The
    junction is the end of a shared prefix that has no state there. Source: vLLM 0.32.0, `MambaManager`, and
    vllm-project/vllm#45845, #52216, where 0 became the default.
    """
    unit = facts.unit

    def positions(prefill: PrefillInfo) -> Sequence[int]:
        boundary = (prefill.prompt - 1) // unit * unit
        junction = min(prefill.matched // unit * unit, boundary)
        chosen = {boundary, junction if junction > prefill.resume else 0}
        if interval is not None:
            chosen.update(range(interval, prefill.prompt + 1, interval))
        return sorted(chosen - {0})

    return Rule(positions)


@PLACEMENTS.register("second_hit")
def second_hit(interval: int | None = None) -> Rule:
    """`second_hit`: where the prompt diverges from all earlier ones and, with `interval`, at multiples before.

    A prefix that is used once costs no state. Compare vLLM's junction (vllm-project/vllm#37898) and branch snapshots
    (NVIDIA/TensorRT-LLM#18272). They depend on the stored prefix; this rule depends on all earlier prompts, so that an
    evicted prefix gets its state at the next use.
    """

    def positions(prefill: PrefillInfo) -> Sequence[int]:
        if prefill.seen <= prefill.resume:
            return ()
        between = () if interval is None else range(interval, prefill.seen, interval)
        return [*between, prefill.seen]

    return Rule(positions)
