"""The contract of a placement of recurrent states: it returns positions in the prompt of each admitted request.

Depths and positions are prompt tokens; a position p is the state after token p - 1. The policy rounds positions
down to the unit of the arm and drops those that are not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.budget import UNLIMITED
from spanlab.core.cost import CostOf, in_tokens
from spanlab.core.request import Request
from spanlab.registry import Registry

if TYPE_CHECKING:
    from spanlab.core.placement.departures import Departures

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
    `request`     token ids, spans, group; a placement must not read the output length, which a server cannot know
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
    """Chooses checkpoint positions; for each admitted request, in order, `observe` and then `place` is called."""

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


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """Properties of an arm that are known before its first request; passed to placements with a parameter `facts`.

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
    departures: Departures | None = None


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
