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
        """Return whether the metric is beyond the limit."""
        measured = numbers[self.metric]
        return bool(measured < self.value if self.below else measured > self.value)


def parse_limit(text: str) -> Limit:
    """Parse a limit such as `token_hit_rate<0.6`; ValueError for any other text."""
    match = _FORM.fullmatch(text)
    if match is None or float(match[3]) > 1:
        expected = f"expected METRIC<SHARE or METRIC>SHARE, METRIC one of {', '.join(METRICS)}, SHARE from 0 to 1"
        raise ValueError(f"fail_on={text}: {expected}")
    return Limit(match[1], match[2] == "<", float(match[3]))
