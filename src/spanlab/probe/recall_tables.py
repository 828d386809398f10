"""Tables of the probe: training, answers by arm, norms of transitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spanlab.probe.recall_scores import KEPT, SEEN, HeadNorm, Score, StateError, TrainingPoint, summarise
from spanlab.report import cells
from spanlab.report.cells import Cell, Table
from spanlab.report.table import Field, tabulate, whole, with_ends
from spanlab.report.units import Ends, percent, significant
from spanlab.stats import Interval


def _small(value: float) -> Cell:
    return Cell(value, significant(value) if value >= SEEN else f"{value:.0e}")


def _accuracy(share: float, ends: Ends | None) -> str:
    return percent(share) if ends is None else f"{percent(share)} [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def _points(points: float, ends: Ends | None) -> str:
    return f"{points:+.1f}" if ends is None else f"{points:+.1f} [{ends[0]:.1f}, {ends[1]:.1f}]"


def _difference(name: str, heading: str) -> tuple[Field, ...]:
    """Return the fields of a difference of shares, in points."""

    def in_points(score: Score) -> Interval:
        share: Interval = getattr(score, name)
        low, high = (None if end is None else 100 * end for end in (share.low, share.high))
        return Interval(100 * share.mean, low, high)

    return with_ends(Field(name, heading, cells.estimate(_points), in_points))


_ANSWERS = (
    Field("arm", "arm", cells.word, left=True),
    *with_ends(Field("accuracy", "accuracy", cells.estimate(_accuracy))),
    Field("updated", "updated\nkeys", cells.percent, "updated.mean"),
    Field("first", "keys of the\nfirst document", cells.percent, "first.mean"),
    Field("loss", "gold loss", cells.number_format(".3f"), "loss.mean"),
    *_difference("minus_full", "minus full view,\npoints"),
    *_difference("minus_exact", "minus exact,\npoints"),
    Field("transition_bytes", "A of one\ndocument", cells.byte_size, "nbytes"),
)
_NORMS = (
    Field(
        "weights",
        "weights, tokens",
        lambda row: Cell(f"{row.source} {row.tokens}", f"{row.source}, {row.tokens}"),
        whole,
        left=True,
    ),
    Field("median", "median\nnorm(A)", _small),
    Field("p90", "p90", _small),
    Field("max", "max", _small, "largest"),
    Field("above_seen", f"heads above\n{SEEN:g}", cells.percent),
    Field("above_kept", f"heads above\n{KEPT:g}", cells.percent),
    Field("decay", "median γ", _small),
    Field("rank_of_kept", f"values above {SEEN:g},\nheads above {KEPT:g}", cells.one_decimal),
)
_HEADINGS = {"source": "weights", "norm": "norm(A)", "decay": "γ", "rank": f"values above {SEEN:g}"}


def answers_table(case: str, scores: Sequence[Score], title: str) -> Table:
    """One row per arm."""
    notes = (
        "Intervals are of 95 %, by a bootstrap over sequences; differences are paired by sequence",
        "An updated key has another value in a later document; the last one is asked for",
    )
    return tabulate(f"answers_{case}", title, _ANSWERS, scores, notes)


def norms_table(norms: Sequence[HeadNorm]) -> Table:
    """Return one row per model and length, over all heads."""
    notes = ("A: transition of a state over a span; γ: its decay without updates",)
    title = "Spectral norm of the transition of a span, over all recurrent layers and heads"
    return tabulate("norms", title, _NORMS, summarise(norms), notes)


def state_errors_table(case: str, errors: Sequence[StateError]) -> Table:
    """A row per arm and weights, a column per recurrent layer."""
    layers = sorted({error.layer for error in errors})
    fields = (
        Field("arm", "weights, arm", lambda arm: Cell(" ".join(arm), f"{arm[0]}, `{arm[1]}`"), left=True),
        *(Field(f"layer_{layer}", f"layer {layer}", _small) for layer in layers),
    )
    rows = [
        {"arm": arm} | {f"layer_{error.layer}": error.error for error in errors if (error.source, error.arm) == arm}
        for arm in dict.fromkeys((error.source, error.arm) for error in errors)
    ]
    title = f"Distance of composed states from those of the full view, relative to these, case {case}"
    return tabulate("state_errors", title, fields, rows)


def heads_table(norms: Sequence[HeadNorm]) -> Table:
    """Every head at every length."""
    names = [field.name for field in dataclasses.fields(HeadNorm)]
    fields = [Field(name, _HEADINGS.get(name, name), _number, left=name == "source") for name in names]
    return tabulate("norms_by_head", "Transitions of a span, by layer and head", fields, norms)


def training_table(points: Sequence[TrainingPoint]) -> Table:
    """Return loss and accuracy by training step."""
    fields = [Field(field.name, field.name, _number) for field in dataclasses.fields(TrainingPoint)]
    return tabulate("training", "Loss and accuracy of training, by what questions read", fields, points)


def _number(value: float | int | str) -> Cell:
    return _small(value) if isinstance(value, float) else Cell(value, str(value))
