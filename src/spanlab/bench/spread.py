"""Several measurements of one thing in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.stats import percentile


def quartiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median, quartiles and the least; None where there is nothing."""
    if not values:
        return None
    points = {f"p{point}": percentile(values, point) for point in (25, 50, 75)}
    return points | {"least": min(values), "count": len(values)}
