"""The front page's table of methods and their answers, and what novel questions leave of speedups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Summary = Mapping[str, Any]
Found = Mapping[str, float | None] | None
CONTROLS = ("random_16", "none_view")  # on the study's own page
HEAD = ("method", "TTFT", "speedup", "computed tokens", "MB held", "benefit kept", "change of gold loss", "KL, nats")


def methods_of_answers(summary: Summary) -> str:
    """One row for each method but the controls: speed, bytes and what is left of the answers."""
    methods = {name: entry for name, entry in summary["methods"].items() if name not in CONTROLS}
    rows = [HEAD, ("---",) * len(HEAD), *(_method(name, entry) for name, entry in methods.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _method(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    change = _between(entry["gold_loss_change"], 1, 2, "+")
    return (
        f"`{name}`",
        _between(entry["ttft_s"], 1000, 0, unit=" ms"),
        _between(entry["speedup"], 1, 2, unit=" ×"),
        _mean(entry["computed_tokens"], 1, 0),
        _mean(entry["bytes"], 1e-6, 0),
        _between(entry["benefit_kept"], 100, 0, unit=" %"),
        f"({change})" if entry["shown"] is False else change,
        _mean(entry["kl"], 1, 3),
    )


def _mean(found: Found, factor: float, digits: int, sign: str = "") -> str:
    return "–" if found is None or found["mean"] is None else f"{factor * found['mean']:{sign},.{digits}f}"


def _between(found: Found, factor: float, digits: int, sign: str = "", unit: str = "") -> str:
    """A mean with its interval, where there is one."""
    if found is None or found["low"] is None or found["high"] is None:
        return _mean(found, factor, digits, sign)
    ends = ", ".join(f"{factor * end:{sign},.{digits}f}" for end in (found["low"], found["high"]))
    return f"{_mean(found, factor, digits, sign)} [{ends}]{unit}"
