"""What is said of engine beside simulator: every cell, the ranks of arms by load, the goals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spanlab.fidelity.compare import Compared, mean_ttft
from spanlab.fidelity.decisions import decide
from spanlab.fidelity.errors import METRICS, Delays, errors
from spanlab.fidelity.goals import judge


def summarise(found: Sequence[Compared]) -> dict[str, Any]:
    """Cells by load and arm, all arms together by load, decisions by load, goals over everything."""
    shares = sorted({one.share for one in found if one.share is not None})
    cells = [one.row() for share in shares for one in found if one.share == share]
    by_load = [[one for one in found if one.share == share] for share in shares]
    decisions = [{"load": share} | ranks(own) for share, own in zip(shares, by_load, strict=True)]
    loads = [{"load": share, "errors": pooled(own)} for share, own in zip(shares, by_load, strict=True)]
    return {"cells": cells, "loads": loads, "decisions": decisions, "goals": judge(cells, decisions)}


def ranks(found: Sequence[Compared]) -> dict[str, Any]:
    """Arms at one load by mean TTFT, on the engine and in the simulator."""
    means = {one.arm: mean_ttft(one) for one in found}
    return decide(
        {arm: repeats for arm, (repeats, _) in means.items()}, {arm: told for arm, (_, told) in means.items()}
    )


def pooled(found: Sequence[Compared]) -> dict[str, Any]:
    """Errors over the requests of all arms together, repeat by repeat."""
    repeats = min(len(one.measured) for one in found)
    measured = [joined([one.measured[at] for one in found]) for at in range(repeats)]
    return errors(measured, joined([one.predicted for one in found]))


def joined(parts: Sequence[Delays]) -> Delays:
    """Requests of several runs as if they were one."""
    return {metric: np.concatenate([part[metric] for part in parts]) for metric in METRICS}
