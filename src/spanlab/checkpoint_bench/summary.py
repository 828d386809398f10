"""Rows become numbers: what captures cost, what checkpoints save, and whether the goal is met."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from spanlab.bench.spread import quartiles
from spanlab.checkpoint_bench.rows import Row
from spanlab.settings.checkpoint_bench import CheckpointBench
from spanlab.stats import percentile

MOST_OVERHEAD, FEW_STATES = 0.05, 8  # the goal: so many states may cost so much of a cold prefill

BYTES = tuple(f"{what}_{by}bytes" for what in ("kv", "state") for by in ("", "allocated_", "formula_"))

Entry = dict[str, Any]


def summarise(settings: CheckpointBench, rows: Sequence[Row]) -> dict[str, Any]:
    """`captures` by arm, `again` by arm, depth and visit, `noise` of the baseline, and the `goal`, by model."""
    bare = _bare(rows)
    captures = [_capture(own, bare) for own in _groups(rows, "cold", "model", "length", "arm")]
    again = [_again(own, bare) for own in _groups(rows, "again", "model", "length", "arm", "shared", "visit")]
    for entry in (*captures, *again):
        strategy = settings.arms[entry["arm"]]
        entry["family"] = strategy.family or strategy.placement.kind
    noise = [_noise(own) for own in _groups(rows, "bare", "model", "length")]
    names = [*settings.chosen(), None]
    for entries in (captures, again, noise):  # groups come by name, and rounds have their own order each
        entries.sort(key=lambda one: (settings.models.index(one["model"]), one["length"], names.index(one.get("arm"))))
    goal = [_goal(model, captures) for model in settings.models]
    return {"captures": captures, "again": again, "noise": noise, "goal": goal}


def _groups(rows: Sequence[Row], kind: str, *keys: str) -> list[list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.kind == kind:
            found[tuple(getattr(row, key) for key in keys)].append(row)
    return [found[place] for place in sorted(found)]


class _Bares:
    """Cold prefills without captures, to be compared with their neighbours in the same round."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[Any, list[Row]] = defaultdict(list)
        for row in rows:
            self._rows[row.cell].append(row)

    def beside(self, row: Row) -> Row:
        """The one that ran nearest to a row."""
        return min(self._rows[row.cell], key=lambda bare: abs(bare.turn - row.turn))


def _bare(rows: Sequence[Row]) -> _Bares:
    return _Bares(row for row in rows if row.kind == "bare")


def _capture(rows: Sequence[Row], bare: _Bares) -> Entry:
    """What one arm's captures cost at one length, and what its cache then holds."""
    pairs = [(row, bare.beside(row)) for row in rows]
    first, states = rows[0], rows[0].captured_states
    return {
        "model": first.model,
        "length": first.length,
        "arm": first.arm,
        "states": states,
        "cold_s": quartiles([row.ttft_s for row in rows]),
        "bare_s": quartiles([base.ttft_s for _, base in pairs]),
        "overhead": quartiles([row.ttft_s / base.ttft_s - 1 for row, base in pairs]),
        "floor": _median(row.capture_floor_s / base.ttft_s for row, base in pairs),
        "per_state_s": _median((row.ttft_s - base.ttft_s) / states for row, base in pairs) if states else None,
        **{key: getattr(first, key) for key in BYTES},
    }


def _again(rows: Sequence[Row], bare: _Bares) -> Entry:
    """What one arm made of one depth; speedups are against a cold prompt of the same length."""
    pairs = [(bare.beside(row), row) for row in rows]
    first = rows[0]
    return {
        "model": first.model,
        "length": first.length,
        "arm": first.arm,
        "shared": first.shared,
        "visit": first.visit,
        "matched": first.matched_tokens,
        "resume": first.reused_tokens,
        "ttft_s": quartiles([row.ttft_s for row in rows]),
        "load_s": _median(row.load_s for row in rows),
        "load_floor_s": first.load_floor_s,
        "bound_s": _median(row.bound_s for row in rows),
        "of_bound": _median(row.bound_s / row.ttft_s for row in rows),
        "modelled_s": first.modelled_s,
        "speedup": quartiles([cold.ttft_s / row.ttft_s for cold, row in pairs]),
        "bound_speedup": _median(cold.bound_s / row.bound_s for cold, row in pairs),
        "logit_gap": max(row.logit_gap for row in rows),
        "logit_scale": first.logit_scale,
    }


def _noise(rows: Sequence[Row]) -> Entry:
    """How far two cold prefills that follow each other differ, with nothing between them that should matter."""
    rounds: dict[int, list[float]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.turn):
        rounds[row.round].append(row.ttft_s)
    apart = [abs(after / before - 1) for times in rounds.values() for before, after in pairwise(times)]
    first = rows[0]
    return {
        "model": first.model,
        "length": first.length,
        "bare_s": quartiles([row.ttft_s for row in rows]),
        "bound_s": first.bound_s,
        "modelled_s": first.modelled_s,
        "apart": quartiles(apart),
    }


def _goal(model: str, captures: Sequence[Entry]) -> Entry:
    """The dearest of the arms with few states, at any length, beside what it may cost."""
    few = [entry for entry in captures if entry["model"] == model and 0 < entry["states"] <= FEW_STATES]
    goal: Entry = {"model": model, "states": FEW_STATES, "most": MOST_OVERHEAD}
    if not few:
        return goal | {"overhead": None, "arm": None, "length": None, "met": None}
    worst = max(few, key=lambda entry: float(entry["overhead"]["p50"]))
    overhead = worst["overhead"]["p50"]
    found = {"arm": worst["arm"], "length": worst["length"], "overhead": overhead}
    return goal | found | {"met": overhead <= MOST_OVERHEAD}


def _median(values: Iterable[float]) -> float:
    return percentile(list(values), 50)
