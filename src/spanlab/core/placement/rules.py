"""Placements that are functions of the lengths of one prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import UNLIMITED, Request
from spanlab.core.rules import Progress
from spanlab.model_spec import CostOf, in_tokens
from spanlab.registry import Registry, positive

# ------------------------------------------------------------------------------
# The contract of a placement of recurrent states: it returns positions in the prompt of each
# admitted request.
#
# Depths and positions are prompt tokens; a position p is the state after token p - 1. The
# policy rounds positions down to the unit of the arm and drops those that are not computed.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]


def unlimited() -> int:
    """Return the free bytes of a store without a limit."""
    return UNLIMITED


class PrefillInfo(NamedTuple):
    """Properties of a request that a placement may read; lengths in tokens.

    `prompt`      length of the prompt
    `matched`     length of its longest stored prefix
    `seen`        length of its longest prefix that any earlier prompt had, stored or not
    `resume`      position at which its computation starts
    `boundaries`  ends of the spans that the workload marks as reusable
    `request`     token ids, spans, group; a placement must not read the output length, which a
                  server cannot know
    `now`         nanoseconds on the clock of the run
    `free_bytes`  function that returns the bytes that the store can take without an eviction
    """

    prompt: int
    matched: int
    seen: int
    resume: int
    boundaries: tuple[int, ...]
    request: Request = Request(0, 0, ())
    now: int = 0
    free_bytes: Callable[[], int] = unlimited


class Placer(Protocol):
    """Chooses checkpoint positions; for each admitted request, in order, `observe` and then `place`
    is called."""

    def observe(self, prefill: PrefillInfo) -> None: ...

    def place(self, prefill: PrefillInfo) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A placement that is a function of the prefill and learns nothing."""

    positions: Callable[[PrefillInfo], Sequence[int]]

    def observe(self, prefill: PrefillInfo) -> None:
        """Do nothing: a rule learns nothing."""

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        return self.positions(prefill)


class DepartureCounts(Protocol):
    """Where requests to come depart from a prompt, in a run whose requests are known."""

    def along(self, request: Request) -> dict[int, int]:
        """Return, by position of a request's prompt, the number of later requests that depart
        there."""
        ...


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """Properties of an arm that are known before its first request; passed to placements with a
    parameter `facts`.

    `grid`        tokens of the model's grid: a kernel writes states at its multiples
    `unit`        positions are rounded down to its multiples
    `warmup`      number of first requests that are not counted
    `max_tokens`  longest prompt of the workload
    `cost`        cost of computing tokens, from the name of the placement's default cost
    `departures`  departures of the requests to come; None where these are not known
    """

    grid: int
    unit: int
    warmup: int
    max_tokens: int
    cost: CostOf = in_tokens
    token_bytes: int = 1
    state_bytes: int = 1
    departures: DepartureCounts | None = None


PLACEMENTS: Registry[Placer] = Registry("placement", given=("facts",))


@dataclass(frozen=True, slots=True)
class Union:
    """A combination of placements: the union of their positions."""

    placers: tuple[Placer, ...]

    def observe(self, prefill: PrefillInfo) -> None:
        for placer in self.placers:
            placer.observe(prefill)

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        return sorted({position for placer in self.placers for position in placer.place(prefill)})


class PlacementError(ValueError):
    """Raised for positions at which no state can be."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A plugin's placement with checked positions: distinct and within the prompt, in any order.

    `name`  key of the settings that chose the placement, for the message
    """

    placer: Placer
    name: str

    def observe(self, prefill: PrefillInfo) -> None:
        self.placer.observe(prefill)

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        positions = list(self.placer.place(prefill))
        for position in positions:
            is_integer = isinstance(position, (int, np.integer)) and not isinstance(position, bool)
            if not is_integer or not 0 < position <= prefill.prompt:
                raise PlacementError(
                    f"{self.name}: position {position!r} in request {prefill.request.id}; "
                    f"expected whole numbers from 1 to {prefill.prompt}, the tokens of the prompt"
                )
        if len(set(positions)) < len(positions):
            raise PlacementError(
                f"{self.name}: positions {positions} in request {prefill.request.id}; expected each once"
            )
        return positions


Interval = Annotated[int, positive, "tokens between two states"]
Between = Annotated[int | None, positive, "tokens between two further states; null: none"]
Count = Annotated[int, positive, "states per prompt"]


@PLACEMENTS.register("none")
def no_states() -> Rule:
    """`none`: no states; only KV is stored."""
    return Rule(lambda prefill: ())


@PLACEMENTS.register("block")
def every_n(interval: Interval) -> Rule:
    """`block`: every `interval` tokens."""
    return Rule(lambda prefill: range(interval, prefill.prompt + 1, interval))


def balanced_positions(prompt: int, count: int) -> range:
    """Return the first `count` multiples of prompt // (count + 1) within the prompt."""
    step = max(1, prompt // (count + 1))
    return range(step, min(prompt, step * count) + 1, step)


@PLACEMENTS.register("balanced")
def balanced(count: Count) -> Rule:
    """`balanced`: `count` states at equal distances."""
    return Rule(lambda prefill: balanced_positions(prefill.prompt, count))


@PLACEMENTS.register("sqrt")
def square_root() -> Rule:
    """`sqrt`: every floor(sqrt(prompt)) tokens."""
    return Rule(
        lambda prefill: range(
            math.isqrt(prefill.prompt), prefill.prompt + 1, math.isqrt(prefill.prompt)
        )
    )


@PLACEMENTS.register("log")
def powers_of_two(
    least: Annotated[int, positive, "least position, rounded up to a power of two"] = 768,
) -> Rule:
    """`log`: the powers of two from `least` on."""
    first = 1 << (least - 1).bit_length()
    return Rule(
        lambda prefill: [first << k for k in range(max(0, (prefill.prompt // first).bit_length()))]
    )


@PLACEMENTS.register("last")
def last() -> Rule:
    """`last`: one state, at the prompt's end."""
    return Rule(lambda prefill: (prefill.prompt,))


@PLACEMENTS.register("tail")
def tail(
    count: Count,
    offset: Annotated[
        int | None, positive, "tokens from the prompt's end to the first state; null: the grid"
    ] = None,
    *,
    facts: ArmFacts,
) -> Rule:
    """`tail`: `count` states at offset · 2^k tokens before the prompt's end, k = 0 … count - 1."""
    distances = [(offset or facts.grid) << k for k in reversed(range(count))]
    return Rule(
        lambda prefill: [
            prefill.prompt - distance for distance in distances if distance < prefill.prompt
        ]
    )


@PLACEMENTS.register("boundary")
def boundary() -> Rule:
    """`boundary`: at the ends of the spans that the workload marks as reusable."""
    return Rule(lambda prefill: prefill.boundaries)


@PLACEMENTS.register("branch")
def branch() -> Rule:
    """`branch`: at the end of the stored prefix, beyond its last state, where other prompts may
    diverge too."""
    return Rule(lambda prefill: (prefill.matched,) if prefill.matched > prefill.resume else ())


@PLACEMENTS.register("branch_else_last")
def branch_else_last(*, facts: ArmFacts) -> Rule:
    """`branch_else_last`: one state at the end of the stored prefix or, if that has a state, at the
    prompt's end.

    A match ends before the prompt's last token. Source: state tracking of SGLang 0.5.23.
    """

    grid = facts.unit

    def positions(prefill: PrefillInfo) -> tuple[int]:
        branch = min(prefill.matched, prefill.prompt - 1) // grid * grid
        return (branch,) if branch > prefill.resume else (prefill.prompt,)

    return Rule(positions)


@PLACEMENTS.register("retention")
def retention(interval: Between = None, *, facts: ArmFacts) -> Rule:
    """`retention`: the last boundary, the junction and, with `interval`, one state per `interval`
    tokens.

    A repeated prompt computes its last token, so the last boundary at which it can resume is before
    that token. The junction is the end of a shared prefix that has no state there. Source: vLLM
    0.32.0, `MambaManager`, and vllm-project/vllm#45845, #52216, where 0 became the default.
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
def second_hit(interval: Between = None) -> Rule:
    """`second_hit`: where the prompt diverges from all earlier ones and, with `interval`, at
    multiples before.

    A prefix that is used once costs no state. Compare vLLM's junction (vllm-project/vllm#37898) and
    branch snapshots (NVIDIA/TensorRT-LLM#18272). They depend on the stored prefix; this rule
    depends on all earlier prompts, so that an evicted prefix gets its state at the next use.
    """

    def positions(prefill: PrefillInfo) -> Sequence[int]:
        if prefill.seen <= prefill.resume:
            return ()
        between = () if interval is None else range(interval, prefill.seen, interval)
        return [*between, prefill.seen]

    return Rule(positions)


# ------------------------------------------------------------------------------
# Placements of states while tokens are computed: at ends of chunks, and in the output.
#
# The batch determines where the chunks of a prompt end, and a server does not know the length
# of an output in advance. A request holds the states of its output until it finishes, and
# stores them with the output up to the last state. A preempted request loses them.
# ------------------------------------------------------------------------------

#: A need of these placements: a policy that follows the progress of its requests.
PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class Following:
    """A placement without positions at admission; `progress` gives positions later."""

    progress: Progress

    def observe(self, prefill: PrefillInfo) -> None:
        """Do nothing: this placement learns nothing."""

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return no positions: they are not known yet."""
        return ()


@PLACEMENTS.register("chunk_end", needs=(PROGRESS,))
def chunk_end(*, facts: ArmFacts) -> Following:
    """`chunk_end`: at the last unit of every chunk of the prompt, as vLLM's align mode and SGLang
    for Kimi K3 do."""
    return Following(Progress(chunk=facts.unit))


@PLACEMENTS.register("decode_interval", needs=(PROGRESS,))
def decode_interval(interval: Interval) -> Following:
    """`decode_interval`: every `interval` tokens of the output; compare vllm-project/vllm#50551."""
    return Following(Progress(interval=interval))


@PLACEMENTS.register("response_end", needs=(PROGRESS,))
def response_end(
    interval: Annotated[
        int | None, positive, "tokens between two positions of the state; null: the unit"
    ] = None,
    *,
    facts: ArmFacts,
) -> Following:
    """`response_end`: the last multiple of `interval`, None: of the unit, that the output reaches.

    A server copies the running state at every multiple and keeps the newest copy. Sources:
    vllm-project/vllm#49574, and the `extra_buffer` strategy of SGLang, whose interval is 256.
    """
    return Following(Progress(newest=facts.unit if interval is None else interval))
