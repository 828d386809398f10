"""What a search has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.study.plan.outcome import Outcome


@dataclass(frozen=True)
class Mark:
    """A value that others recommend, in the figure of a search."""

    words: str
    value: float


@dataclass(frozen=True)
class Axis:
    """What varies: its name in `summary.json`, its name in figures with the unit, and whether steps are ratios."""

    key: str
    label: str
    logarithmic: bool = True


@dataclass(frozen=True)
class Found:
    """The result of a search.

    `axis`      what was varied
    `curve`     every value that was tried, increasing; empty where none could be
    `verdict`   the answer in one sentence without its full stop, or why there is none
    `helps`     whether some value meets the targets
    `value`     the value that answers, on the axis; None where none does
    `answer`    keys for `summary.json`
    `marks`     values that others recommend
    `caveats`   where the answer is less than it seems
    """

    axis: Axis
    curve: Sequence[tuple[float, Outcome]]
    verdict: str
    helps: bool
    value: float | None
    answer: Mapping[str, Any]
    marks: Sequence[Mark] = ()
    caveats: Sequence[str] = ()
