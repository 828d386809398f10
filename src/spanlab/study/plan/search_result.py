"""The result of a search, its axis and its marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanlab.study.plan.outcome import Outcome


@dataclass(frozen=True)
class Mark:
    """A value that another system recommends, marked in the figure of a search."""

    label: str
    value: float


@dataclass(frozen=True)
class Axis:
    """The varied quantity: key in `summary.json`, label with unit in figures, and whether the scale is logarithmic."""

    key: str
    label: str
    logarithmic: bool = True


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    `axis`      the varied quantity
    `curve`     every tried value with its outcome, in increasing order; empty where none could be tried
    `verdict`   the answer in one sentence without a full stop, or the reason why there is none
    `value`     the best value on the axis that meets the targets; None without one
    `answer`    keys for `summary.json`
    `marks`     values that other systems recommend
    `caveats`   limitations of the answer
    """

    axis: Axis
    curve: Sequence[tuple[float, Outcome]]
    verdict: str
    value: float | None
    answer: Mapping[str, Any]
    marks: Sequence[Mark] = ()
    caveats: Sequence[str] = ()

    @property
    def helps(self) -> bool:
        """Whether some value meets the targets."""
        return self.value is not None
