"""Rows become numbers: medians and quartiles by arm, paired speedups, and how near times are to their bounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from spanlab.bench.spread import quartiles
from spanlab.pic_bench.rows import Row
from spanlab.settings.pic_bench import PicBench
from spanlab.stats import percentile

PARTS = ("plan_s", "copy_s", "fill_s", "repair_s", "prefill_s", "other_s")

Group = tuple[str, str, str, str]


def summarise(settings: PicBench, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each model, size, arm and order, in the order in which they ran."""
    groups: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.model, row.size, row.arm, row.order].append(row)
    entries = []
    for (model, size, arm, order), own in groups.items():
        baseline = groups[model, size, settings.baseline, "shuffled"]
        family = settings.arms[arm].family or arm
        entry = {"model": model, "size": size, "arm": arm, "order": order, "family": family}
        entries.append(entry | _entry(own, {(row.trial, row.index): row for row in baseline if row.kind != "prepare"}))
    return entries


def _entry(rows: Sequence[Row], baseline: dict[tuple[int, int], Row]) -> dict[str, Any]:
    """What one arm did with one size. Requests of the baseline are all cold; the others' repeats are warm."""
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in ("prepare", "cold", "warm")}
    warm = by_kind["warm"]
    entry: dict[str, Any] = {"requests": len(warm), "prompt_tokens": _median(row.prompt_tokens for row in warm)}
    entry |= {f"{kind}_ttft_s": quartiles([row.ttft_s for row in by_kind[kind]]) for kind in ("cold", "warm")}
    entry["token_hit_rate"] = sum(row.reused_tokens for row in warm) / sum(row.prompt_tokens for row in warm)
    for key in ("computed_tokens", "repaired_tokens", "copied_tokens"):
        entry[key] = _median(getattr(row, key) for row in warm)
    entry["parts_s"] = {part: _median(getattr(row, part) for row in warm) for part in PARTS}
    entry |= {key: _median(getattr(row, key) for row in warm) for key in ("bound_s", "compute_s", "memory_s")}
    entry["of_bound"] = _median(row.bound_s / row.ttft_s for row in warm)
    if by_kind["prepare"]:
        entry["prepare_s"] = _prepared(by_kind["prepare"])
    return entry | _speedup(warm, baseline)


def _speedup(warm: Sequence[Row], baseline: dict[tuple[int, int], Row]) -> dict[str, Any]:
    """Against the baseline on the same prompt, where that has the same tokens: orders differ in where documents stand.

    The same order is compared with the shuffled baseline too: as many tokens, all of them computed.
    """
    pairs = [(baseline[row.trial, row.index], row) for row in warm]
    measured = [cold.ttft_s / row.ttft_s for cold, row in pairs]
    bound = _median(cold.bound_s / row.bound_s for cold, row in pairs)
    speedup = quartiles(measured)
    assert speedup is not None, "an arm without warm requests"
    return {"speedup": speedup, "bound_speedup": bound}


def _prepared(rows: Sequence[Row]) -> dict[str, float] | None:
    """Seconds that filling the cache took, by trial."""
    trials: dict[int, float] = defaultdict(float)
    for row in rows:
        trials[row.trial] += row.ttft_s
    return quartiles(list(trials.values()))


def _median(values: Iterable[float]) -> float:
    return percentile(list(values), 50)
