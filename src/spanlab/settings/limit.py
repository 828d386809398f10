"""A limit on a result that ends a run with an error: `token_hit_rate<0.6`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METRICS = ("token_hit_rate", "mean_token_hit_rate", "request_hit_rate")
_FORM = re.compile(rf"\s*({'|'.join(METRICS)})\s*([<>])\s*(\d*\.?\d+)\s*")


@dataclass(frozen=True)
class Limit:
    """`metric` below or above `value`, a share from 0 to 1, is an error."""

    metric: str
    below: bool
    value: float

    def holds(self, numbers: Mapping[str, Any]) -> bool:
        """Whether the numbers are beyond the limit."""
        found = numbers[self.metric]
        return bool(found < self.value if self.below else found > self.value)


def parse_limit(text: str) -> Limit:
    """The limit that a text states; ValueError for any other text."""
    found = _FORM.fullmatch(text)
    if found is None or float(found[3]) > 1:
        expected = f"expected METRIC<SHARE or METRIC>SHARE, METRIC one of {', '.join(METRICS)}, SHARE from 0 to 1"
        raise ValueError(f"fail_on={text}: {expected}")
    return Limit(found[1], found[2] == "<", float(found[3]))
