"""What a placement of recurrent states is: it is asked once per admitted request for positions in the prompt.

Depths and positions are prompt tokens; a position p means the state after token p - 1. The policy rounds positions
down to the unit of the arm and leaves out those that are not computed.
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
    """The free bytes of a store without a limit."""
    return UNLIMITED


class PrefillInfo(NamedTuple):
    """What a placement may know of a request; lengths in tokens.

    `prompt`      the prompt
    `matched`     its longest stored prefix
    `seen`        its longest prefix that any earlier prompt began with, stored or not
    `resume`      where its computation starts
    `boundaries`  ends of the spans that the workload marks as reusable
    `request`     token ids, spans, group; not the length of the output, which no server knows
    `now`         nanoseconds on the clock of the run
    `free_bytes`  call it for the bytes that the store can take without an eviction
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
    """Chooses checkpoint positions; both are called once per admitted request, in order, `observe` first."""

    def observe(self, prefill: PrefillInfo) -> None: ...

    def place(self, prefill: PrefillInfo) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A placement that is a plain function of the prefill and learns nothing."""

    positions: Callable[[PrefillInfo], Sequence[int]]

    def observe(self, prefill: PrefillInfo) -> None:
        """A rule learns nothing."""

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        return self.positions(prefill)


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """What is known of an arm before its first request; a placement that has a parameter `facts` gets them.

    `grid`        tokens of the model's grid: a kernel leaves states at its multiples
    `unit`        tokens that positions are rounded down to
    `warmup`      requests that are not counted
    `max_tokens`  longest prompt of the workload
    `cost`        what computing tokens costs, from the name of the cost that is usual for the placement
    `departures`  of the requests to come; None where these are not known
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
    """Several placements at once: the union of their positions."""

    placers: tuple[Placer, ...]

    def observe(self, prefill: PrefillInfo) -> None:
        for placer in self.placers:
            placer.observe(prefill)

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        return sorted({position for placer in self.placers for position in placer.place(prefill)})


class PlacementError(ValueError):
    """Positions that no state can have."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A placement from elsewhere, whose positions are checked: increasing or not, each must be new and in the prompt.

    `name`  the key of the settings that chose it, for the message
    """

    placer: Placer
    name: str

    def observe(self, prefill: PrefillInfo) -> None:
        self.placer.observe(prefill)

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        positions = list(self.placer.place(prefill))
        for position in positions:
            whole = isinstance(position, (int, np.integer)) and not isinstance(position, bool)
            if not whole or not 0 < position <= prefill.prompt:
                raise PlacementError(
                    f"{self.name}: position {position!r} in request {prefill.request.id}; "
                    f"expected whole numbers from 1 to {prefill.prompt}, the tokens of the prompt"
                )
        if len(set(positions)) < len(positions):
            raise PlacementError(
                f"{self.name}: positions {positions} in request {prefill.request.id}; expected each once"
            )
        return positions
