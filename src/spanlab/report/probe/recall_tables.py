"""Tables of the probe: training, answers by arm, norms of transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

from spanlab.analysis.recall import KEPT, SEEN, HeadNorm, NormSummary, Score, StateError, TrainingPoint, summarise
from spanlab.report.tables import MISSING, Cell, Column, Table
from spanlab.report.units import byte_size, percent, significant
from spanlab.stats import Interval

_ANSWERS = (
    Column("arm", "arm", left=True),
    *(Column("accuracy", "accuracy"), Column("accuracy_low", ""), Column("accuracy_high", "")),
    *(Column("updated", "updated\nkeys"), Column("first", "keys of the\nfirst document"), Column("loss", "gold loss")),
    *(Column("minus_full", "minus full view,\npoints"), Column("minus_full_low", ""), Column("minus_full_high", "")),
    *(Column("minus_exact", "minus exact,\npoints"), Column("minus_exact_low", ""), Column("minus_exact_high", "")),
    Column("transition_bytes", "A of one\ndocument"),
)
_NORMS = (
    Column("weights", "weights, tokens", left=True),
    *(Column("median", "median\nnorm(A)"), Column("p90", "p90"), Column("max", "max")),
    *(Column("above_seen", f"heads above\n{SEEN:g}"), Column("above_kept", f"heads above\n{KEPT:g}")),
    *(Column("decay", "median γ"), Column("rank_of_kept", f"values above {SEEN:g},\nheads above {KEPT:g}")),
)
_HEADINGS = {"source": "weights", "norm": "norm(A)", "decay": "γ", "rank": f"values above {SEEN:g}"}


def answers_table(case: str, scores: Sequence[Score], title: str) -> Table:
    """One row per arm."""
    notes = (
        "Intervals are of 95 %, by a bootstrap over sequences; differences are paired by sequence",
        "An updated key has another value in a later document; the last one is asked for",
    )
    return Table(f"answers_{case}", title, _ANSWERS, tuple(map(_score_row, scores)), notes)


def _score_row(score: Score) -> tuple[Cell, ...]:
    accuracy, loss = score.accuracy, score.loss.mean
    return (
        Cell(score.arm, score.arm),
        *_with_ends(accuracy, percent(accuracy.mean)),
        *(
            MISSING if interval is None else Cell(interval.mean, percent(interval.mean))
            for interval in (score.updated, score.first)
        ),
        Cell(loss, f"{loss:.3f}"),
        *_difference(score.minus_full),
        *_difference(score.minus_exact),
        MISSING if score.nbytes is None else Cell(score.nbytes, byte_size(score.nbytes)),
    )


def _difference(points: Interval) -> tuple[Cell, ...]:
    """A difference of shares, in points."""
    return _with_ends(Interval(*(100 * (end or 0.0) for end in points)), f"{100 * points.mean:+.1f}")


def _with_ends(interval: Interval, text: str) -> tuple[Cell, ...]:
    assert interval.low is not None, "two sequences or more have an interval"
    assert interval.high is not None, "two sequences or more have an interval"
    share = 100 if text.endswith("%") else 1
    ends = f"[{share * interval.low:.1f}, {share * interval.high:.1f}]"
    return Cell(interval.mean, f"{text} {ends}"), Cell(interval.low, ""), Cell(interval.high, "")


def norms_table(norms: Sequence[HeadNorm]) -> Table:
    """Return one row per model and length, over all heads."""
    notes = ("A: transition of a state over a span; γ: its decay without updates",)
    title = "Spectral norm of the transition of a span, over all recurrent layers and heads"
    return Table("norms", title, _NORMS, tuple(map(_norm_row, summarise(norms))), notes)


def _norm_row(row: NormSummary) -> tuple[Cell, ...]:
    rank = MISSING if row.rank_of_kept is None else Cell(row.rank_of_kept, f"{row.rank_of_kept:.1f}")
    return (
        Cell(f"{row.source} {row.tokens}", f"{row.source}, {row.tokens}"),
        *(_small(value) for value in (row.median, row.p90, row.largest)),
        *(Cell(share, percent(share)) for share in (row.above_seen, row.above_kept)),
        _small(row.decay),
        rank,
    )


def _small(value: float) -> Cell:
    return Cell(value, significant(value) if value >= SEEN else f"{value:.0e}")


def state_errors_table(case: str, errors: Sequence[StateError]) -> Table:
    """A row per arm and weights, a column per recurrent layer."""
    layers = sorted({error.layer for error in errors})
    columns = (
        Column("arm", "weights, arm", left=True),
        *(Column(f"layer_{layer}", f"layer {layer}") for layer in layers),
    )
    distances = {(error.source, error.arm, error.layer): error.error for error in errors}
    rows = [
        (Cell(f"{source} {arm}", f"{source}, `{arm}`"), *(_small(distances[source, arm, layer]) for layer in layers))
        for source, arm in dict.fromkeys((error.source, error.arm) for error in errors)
    ]
    title = f"Distance of composed states from those of the full view, relative to these, case {case}"
    return Table("state_errors", title, columns, tuple(rows))


def heads_table(norms: Sequence[HeadNorm]) -> Table:
    """Every head at every length."""
    names = [field.name for field in fields(HeadNorm)]
    columns = tuple(Column(name, _HEADINGS.get(name, name), left=name == "source") for name in names)
    rows = tuple(tuple(_number(value) for value in astuple(head)) for head in norms)
    return Table("norms_by_head", "Transitions of a span, by layer and head", columns, rows)


def training_table(points: Sequence[TrainingPoint]) -> Table:
    """Return loss and accuracy by training step."""
    columns = tuple(Column(field.name, field.name) for field in fields(TrainingPoint))
    rows = tuple(tuple(_number(value) for value in astuple(point)) for point in points)
    return Table("training", "Loss and accuracy of training, by what questions read", columns, rows)


def _number(value: float | int | str) -> Cell:
    return _small(value) if isinstance(value, float) else Cell(value, str(value))
