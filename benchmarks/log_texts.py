"""Sentences and tables of the pages about a server's own log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pages import table

Summary = Mapping[str, Any]
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}


def explain_claim(summary: Summary) -> str:
    """Return hit rate of the explained arm, the bounds, and the first fix."""
    rate = summary["presets"][summary["explained"]]["token_hit_rate"]
    bounds, first = summary["bounds"], summary["fixes"][0]
    helps = f"`{first['name']}` reuses {percent(first['token_hit_rate'])}" if first["helps"] else summary["verdict"]
    return (
        f"{summary['requests']:,} requests: `{summary['explained']}` reuses {percent(rate)} of the prompt tokens, a "
        f"prefix cache without limit {percent(bounds['prefix'])}; {percent(bounds['any_position'])} come again "
        f"anywhere, and {helps}.\n"
    )


def percent(share: float, sign: str = "") -> str:
    """Return a share in percent."""
    return f"{100 * share:{sign}.1f} %"


def plan_claim(summary: Summary) -> str:
    """Return the verdict of a plan."""
    return f"{summary['verdict']}.\n"


def twin_errors(*summaries: Summary) -> str:
    """Return the errors on unseen requests by server: mean, then median and p95 per request."""
    head = ["server", "requests fitted, tested", *(f"{name}: mean, p50, p95" for name in METRICS.values())]
    return table(head, map(_server_row, summaries))


def _server_row(summary: Summary) -> list[str]:
    return [_server(summary), f"{summary['split']['train']}, {summary['split']['test']}", *_errors(summary["unseen"])]


def _server(summary: Summary) -> str:
    deployment = summary["deployment"]
    devices = deployment["tensor_parallel"] * deployment["data_parallel"]
    return f"{summary['model']} on {devices} × {summary['hardware']}"


def _errors(unseen: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for metric in METRICS:
        error = unseen[metric]
        yield f"{percent(error['mean_error'], '+')}, {percent(error['p50_error'])}, {percent(error['p95_error'])}"
