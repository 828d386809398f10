"""One row per request; a cell is the rows of one arm in one trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["prepare", "cold", "warm"]


class Cell(NamedTuple):
    """One arm in one trial, from an empty cache on."""

    model: str
    size: str
    trial: int
    arm: str
    order: str


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times are seconds from its admission; token counts are prompt tokens, as in `records.Record`.

    `plan_s` … `other_s`  what the time to the first token went to; a forward that serves several goes to the first
    `bound_s`             the roofline of its steps, `compute_s` and `memory_s` either side alone
    """

    model: str
    size: str
    trial: int
    arm: str
    order: str
    kind: Kind
    index: int
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    repaired_tokens: int
    copied_tokens: int
    output_tokens: int
    ttft_s: float
    finished_s: float
    plan_s: float
    copy_s: float
    fill_s: float
    repair_s: float
    prefill_s: float
    other_s: float
    bound_s: float
    compute_s: float
    memory_s: float

    @property
    def cell(self) -> Cell:
        """Where it belongs."""
        return Cell(self.model, self.size, self.trial, self.arm, self.order)
