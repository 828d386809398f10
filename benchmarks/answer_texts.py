"""The front page's table of methods and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pages import table

Summary = Mapping[str, Any]
Interval = Mapping[str, float | None] | None
CONTROLS = ("random_16", "none_view")  # only on the study's own page
HEAD = ("method", "TTFT", "speedup", "computed tokens", "MB held", "benefit kept", "change of gold loss", "KL, nats")


def methods_of_answers(summary: Summary) -> str:
    """Return one row for each method except the controls: speed, bytes and answer quality."""
    methods = {name: entry for name, entry in summary["methods"].items() if name not in CONTROLS}
    return table(HEAD, (_method(name, entry) for name, entry in methods.items()))


def _method(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    change = _with_interval(entry["gold_loss_change"], 1, 2, "+")
    return (
        f"`{name}`",
        _with_interval(entry["ttft_s"], 1000, 0, unit=" ms"),
        _with_interval(entry["speedup"], 1, 2, unit=" ×"),
        _mean(entry["computed_tokens"], 1, 0),
        _mean(entry["bytes"], 1e-6, 0),
        _with_interval(entry["benefit_kept"], 100, 0, unit=" %"),
        f"({change})" if entry["shown"] is False else change,
        _mean(entry["kl"], 1, 3),
    )


def _mean(value: Interval, factor: float, digits: int, sign: str = "") -> str:
    return "–" if value is None or value["mean"] is None else f"{factor * value['mean']:{sign},.{digits}f}"


def _with_interval(value: Interval, factor: float, digits: int, sign: str = "", unit: str = "") -> str:
    """Return a mean, with its interval if it has one."""
    if value is None or value["low"] is None or value["high"] is None:
        return _mean(value, factor, digits, sign)
    ends = ", ".join(f"{factor * end:{sign},.{digits}f}" for end in (value["low"], value["high"]))
    return f"{_mean(value, factor, digits, sign)} [{ends}]{unit}"
