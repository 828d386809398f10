"""One row per request; a cell is one round at one length: all arms in turns, so that what disturbs one disturbs all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["bare", "cold", "again"]


class Cell(NamedTuple):
    """All arms once."""

    model: str
    length: int
    round: int


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times are seconds from its admission, token counts prompt tokens, bytes what the cache then holds.

    `kind`       bare: cold, without captures; cold: with those that the arm plans; again: as far as `shared`
    `turn`       its session's place in the round
    `visit`      how often that depth was asked before in this session
    `load_s`     the copy of the state that it starts from; `load_floor_s` that copy at this machine's measured rate
    `capture_floor_s`  the same for the states that it captures
    `bound_s`    the roofline of its steps at this machine's measured rates
    `modelled_s` the simulator's, for the hardware named
    `*_bytes`    by the policy's account; `*_allocated_bytes` the pools' tensors; `*_formula_bytes` model sizes times
                 tokens and states
    `logit_gap`  largest |difference| of its first token's logits to those of a full prefill; `logit_scale` the largest
                 |logit| of that
    """

    model: str
    length: int
    round: int
    turn: int
    arm: str
    kind: Kind
    shared: int
    visit: int
    matched_tokens: int
    reused_tokens: int
    computed_tokens: int
    captured_states: int
    ttft_s: float
    plan_s: float
    load_s: float
    prefill_s: float
    bound_s: float
    modelled_s: float
    load_floor_s: float
    capture_floor_s: float
    kv_bytes: int
    kv_allocated_bytes: int
    kv_formula_bytes: int
    state_bytes: int
    state_allocated_bytes: int
    state_formula_bytes: int
    logit_gap: float
    logit_scale: float

    @property
    def cell(self) -> Cell:
        """Where it belongs."""
        return Cell(self.model, self.length, self.round)
