"""Sentences and tables of the pages about a server's own log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pages import table

from spanlab.analyses.breaks import short_sides

Summary = Mapping[str, Any]
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
COMPARED = ("ttft", "e2e")  # metrics by which a twin is compared with predictors without a model
ERRORS = {"mean_error": "mean", "p50_error": "p50", "p95_error": "p95"}
PREDICTORS = {"line": "line", "mean": "mean", "last": "last value"}


def explain_claim(summary: Summary) -> str:
    """Return hit rate of the explained arm, the bounds, and the first fix."""
    rate = summary["presets"][summary["explained"]]["token_hit_rate"]
    bounds, first = summary["bounds"], summary["fixes"][0]
    fix = f"`{first['name']}` reuses {percent(first['token_hit_rate'])}" if first["helps"] else summary["verdict"]
    return (
        f"The log has {summary['requests']:,} requests. "
        f"`{summary['explained']}` reuses {percent(rate)} of the prompt tokens. "
        f"A prefix cache without limit reuses {percent(bounds['prefix'])}.\n"
        f"{percent(bounds['any_position'])} of the tokens occur again at any position. "
        f"The fix with the largest gain for its memory: {fix}.\n"
    )


def break_claim(summary: Summary) -> str:
    """Return the largest group of breaks, with the texts on both sides of one."""
    row = summary["breaks"][0]
    parted = f"{row['requests']:,} of {summary['breaks_found']['requests']:,} prompts that part from earlier ones"
    sides = "\n".join(short_sides(row["earlier"], row["later"]))
    return f"```text\n{parted}: {row['says']}\n{sides}\n```\n"


def percent(share: float, sign: str = "") -> str:
    """Return a share in percent."""
    return f"{100 * share:{sign}.1f} %"


def plan_claim(summary: Summary) -> str:
    """Return the verdict of a plan, one part a line."""
    return "".join(f"- {part}.\n" for part in summary["verdict"].split("; "))


def twin_errors(*summaries: Summary) -> str:
    """Return the errors on unseen requests by server and predictor: mean, then median and p95 per request."""
    head = ["server", "fitted, tested", "predictor", *(f"{name}: mean, p50, p95" for name in METRICS.values())]
    return table(head, (row for summary in summaries for row in _server_rows(summary)))


def _server_rows(summary: Summary) -> Iterator[list[str]]:
    split = f"{summary['split']['train']}, {summary['split']['test']}"
    yield [_server(summary), split, "twin", *_errors(summary["unseen"])]
    for name, title in PREDICTORS.items():
        yield ["", "", title, *_errors(summary["without_model"][name]["unseen"])]


class Comparison(NamedTuple):
    """Absolute errors of a twin and of the best predictor without a model, for one metric and one kind of error."""

    name: str
    twin: float
    predictor: str
    other: float

    @property
    def wins(self) -> bool:
        """Whether the twin has the smaller error."""
        return self.twin < self.other

    def text(self) -> str:
        """Return both errors."""
        return f"{self.name}: twin {percent(self.twin)}, {PREDICTORS[self.predictor]} {percent(self.other)}"


def _comparisons(summary: Summary) -> list[Comparison]:
    """Compare with the predictor of least error, chosen after the fact for each comparison, which favours it."""
    compared = []
    for metric in COMPARED:
        for kind, name in ERRORS.items():
            others = {
                predictor: abs(errors["unseen"][metric][kind])
                for predictor, errors in summary["without_model"].items()
                if errors["unseen"][metric][kind] is not None
            }
            best = min(others, key=lambda predictor: others[predictor])
            twin = abs(summary["unseen"][metric][kind])
            compared.append(Comparison(f"{METRICS[metric]} {name}", twin, best, others[best]))
    return compared


def twin_claim(*summaries: Summary) -> str:
    """Return how often the twin has a smaller error than the best predictor without a model, and where it has not."""
    by_server = {_server(summary): _comparisons(summary) for summary in summaries}
    every = [comparison for compared in by_server.values() for comparison in compared]
    lost = {server: [each for each in compared if not each.wins] for server, compared in by_server.items()}
    wins = sum(each.wins for each in every)
    where = "".join(f"- {server}: {each.text()}.\n" for server, larger in lost.items() for each in larger)
    return (
        "Three predictors without a model: a line, the mean and the last value of the fitted requests.\n"
        f"The twin's error is smaller than the best of the three in {wins} of {len(every)} comparisons.\n"
        f"They cover {len(summaries)} logs, TTFT and E2E, and the error of the mean, median and p95.\n"
        + (f"\nThe twin's error is larger here:\n\n{where}" if where else "")
    )


def twin_margins(*summaries: Summary) -> str:
    """Return the errors of the twin and of the best predictor without a model, for every comparison."""
    compared = {_server(summary): _comparisons(summary) for summary in summaries}
    head = ["server", *(each.name for each in next(iter(compared.values()))), "twin smaller"]
    rows = (
        (
            server,
            *(f"{percent(each.twin)}, {PREDICTORS[each.predictor]} {percent(each.other)}" for each in every),
            f"{sum(each.wins for each in every)} of {len(every)}",
        )
        for server, every in compared.items()
    )
    return table(head, rows)


def _server(summary: Summary) -> str:
    deployment = summary["deployment"]
    devices = deployment["tensor_parallel"] * deployment["data_parallel"]
    return f"{summary['model']} on {devices} × {summary['hardware']}"


def _errors(unseen: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for metric in METRICS:
        error = unseen[metric]
        yield f"{percent(error['mean_error'], '+')}, {percent(error['p50_error'])}, {percent(error['p95_error'])}"
