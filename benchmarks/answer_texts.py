"""The front page's table of methods and their answers, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pages import table

Summary = Mapping[str, Any]
Interval = Mapping[str, float | None] | None
#: Arms of the front page, with their names there. The page of the study has all arms.
SHOWN = {
    "none": "full recompute",
    "radix": "prefix cache",
    "cached_order": "prefix cache, passages in cached order",
    "pic": "position-independent, no repair",
    "query_aware_16": "position-independent, repaired",
}
HEAD = ("method", "TTFT", "speedup", "benefit kept")
WITHOUT_REPAIR = ("pic", "ape")
EXACT = ("none", "prefix", "radix", "cached_order", "control")


def methods_of_answers(summary: Summary) -> str:
    """Return one row for each shown method: time to first token, speedup and benefit kept."""
    methods = summary["methods"]
    rows = [(f"`{arm}`: {name}", *_cells(methods[arm])) for arm, name in SHOWN.items()]
    plain = methods["none"].get("plain_s")
    beside = f" The same prompts take {_with_interval(plain, 1000, 0, ' ms')} in plain transformers." if plain else ""
    origin = (
        f"Measured: {summary['engine']['model']} on {summary['engine']['device']}.{beside}\n"
        f"{methods['none']['questions']} questions about {summary['documents']} collections of facts, "
        f"commit {summary['commit']}.\n"
    )
    return f"{table(HEAD, rows)}\n{origin}"


def answers_claim(summary: Summary) -> str:
    """Return how many repairs are slower than full recompute, and which methods keep the most benefit."""
    methods = summary["methods"]
    pic = {arm: entry for arm, entry in methods.items() if entry["family"] not in EXACT}
    repairs = [entry for entry in pic.values() if entry["family"] not in WITHOUT_REPAIR]
    speedups = [entry["speedup"] for entry in repairs]
    slower = sum(speedup["high"] < 1 for speedup in speedups if speedup)
    speed = f"{slower} of {len(repairs)} repairs are slower than full recompute."
    withheld = "Speedups are withheld: the machine was noisy."
    most = max(pic, key=lambda arm: pic[arm]["benefit_kept"]["mean"])
    ordered, repaired = (100 * methods[arm]["benefit_kept"]["mean"] for arm in ("cached_order", most))
    return (
        f"{speed if all(speedups) else withheld}\n"
        f"Cached order keeps {ordered:.0f} % of the benefit.\n"
        f"The best position-independent method, `{most}`, keeps {repaired:.0f} %.\n"
    )


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _with_interval(entry["ttft_s"], 1000, 0, " ms"),
        _with_interval(entry["speedup"], 1, 2, " ×"),
        _with_interval(entry["benefit_kept"], 100, 0, " %"),
    )


def _with_interval(value: Interval, factor: float, digits: int, unit: str) -> str:
    """Return a mean with its interval."""
    if value is None or value["mean"] is None:
        return "–"
    mean, *ends = (f"{factor * value[name]:.{digits}f}" for name in ("mean", "low", "high") if value[name] is not None)
    return f"{mean} [{', '.join(ends)}]{unit}" if ends else f"{mean}{unit}"
