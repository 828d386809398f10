"""Latency limits that a request must meet to count in the goodput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanlab.checks import positive

if TYPE_CHECKING:
    from spanlab.settings.study import Study


@dataclass
class RequestGoal:
    """Limits of one request; it counts in the goodput if it meets all of them; null: no limit.

    `ttft_s`  time to first token, seconds
    `tpot_s`  time per output token after the first, seconds; a request with one output token meets it
    `e2e_s`   time to the last token, seconds
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        limits = vars(self)
        for key, limit in limits.items():
            positive(f"goodput.{key}", limit)
        if set(limits.values()) == {None}:
            raise ValueError("goodput without a limit: expected ttft_s, tpot_s or e2e_s")


def check_goodput(study: Study) -> None:
    """Raise ValueError for goals that no analysis reads."""
    if study.goodput and "serving" not in study.chosen_analyses():
        goals = ", ".join(study.goodput)
        raise ValueError(f"goodput of {goals} with analyses={study.chosen_analyses()}: expected serving among them")
