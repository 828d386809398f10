"""Run folder of the three programs: scores of answers, tables, figures and summary."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from probe_settings import HybridAnswers, TailReplay, TrainProbe

from spanlab.compiled import HOME
from spanlab.errors import sentence
from spanlab.provenance import PACKAGES_OF, run_facts
from spanlab.registry import one_of
from spanlab.report import style
from spanlab.report.table import (
    Cell,
    Ends,
    Field,
    Page,
    Table,
    byte_size,
    estimate,
    facts_of,
    number_format,
    one_decimal,
    percent,
    percent_text,
    significant,
    tabulate,
    whole,
    with_ends,
    word,
    write_page,
)
from spanlab.stats import Interval, percentile, positive_ratio, ratio, share
from spanlab.study.folder import CONFIG, RunFolder, draw_figures, folder_name, publish, write_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Run folder of the probe's entries: tables, figures, report, summary.
# ------------------------------------------------------------------------------

FOLDER = "probe"
CAVEATS = (
    "a model of a million parameters that was trained on synthetic facts: what it shows need not hold of published "
    "weights",
)


@dataclass(frozen=True)
class Findings:
    """Results of a run.

    `data`     description of the data
    `model`    description of the model
    `tables`   all tables; the first `printed` tables are printed
    `figures`  functions that draw a figure with a given footer, by name
    `caveats`  limits of the numbers
    """

    data: str
    model: str
    tables: Sequence[Table]
    printed: int
    figures: Mapping[str, Callable[[str], Figure]] = field(default_factory=dict)
    caveats: Sequence[str] = CAVEATS


def write_findings(
    folder: RunFolder, title: str, settings: TrainProbe | HybridAnswers | TailReplay, findings: Findings, started: float
) -> None:
    """Write and publish the run folder, and print the tables; `started` is a time of `perf_counter`."""
    summary = {
        "workload": {"provenance": "made by this program", "detail": findings.data},
        "model": findings.model,
        "engine": {"device": f"cpu, {settings.threads} thread{'s' if settings.threads > 1 else ''}"},
        "seeds": [settings.seed],
        "caveats": list(findings.caveats),
        **run_facts(time.perf_counter() - started, PACKAGES_OF["engine"]),
    }
    write_results(summary, findings.tables, folder.work)
    footer = f"{findings.data} · {findings.model} · commit {summary['commit']}"
    draws = {name: partial(draw, footer) for name, draw in findings.figures.items() if settings.output.figures}
    page = Page(
        title,
        findings.tables,
        about=(findings.data, findings.model),
        caveats=tuple(findings.caveats),
        figures=draw_figures(draws, folder.work / "figures"),
        config=(folder.work / CONFIG).read_text(),
        facts=facts_of(summary),
    )
    write_page(page, folder.work)
    publish(folder, findings.tables[: findings.printed])


# ------------------------------------------------------------------------------
# Measurements of the probe: points of its training, scores of its answers, norms of its
# transitions.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SEEN = 1e-3  # singular values and norms up to here count as zero
KEPT = 0.1  # heads with a larger norm preserve a state across a span


@dataclass(frozen=True)
class TrainingPoint:
    """Means over the steps since the last point.

    `step`   number of training steps so far
    `read`   way in which the questions of these steps read the memory
    `steps`  number of steps in the mean
    `loss`   of the gold answers, nats
    """

    step: int
    read: str
    steps: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class StateError:
    """Relative error of the states that an arm composes in one layer, against those of the full view.

    `source`  the weights: trained, published, slow
    """

    source: str
    arm: str
    layer: int
    error: float


@dataclass(frozen=True)
class HeadNorm:
    """Norm of one head's transition, as means over spans of one length.

    `source`  the weights: trained, published, slow
    `norm`    spectral norm of A
    `decay`   γ, the factor of forgetting alone
    `rank`    singular values of A above SEEN
    """

    source: str
    layer: int
    head: int
    tokens: int
    norm: float
    decay: float
    rank: float


@dataclass(frozen=True)
class NormSummary:
    """All heads of one model at one length.

    `above_seen, above_kept`  shares of the heads whose norm is above SEEN, KEPT
    `rank_of_kept`            mean rank of the heads above KEPT; None without any
    """

    source: str
    tokens: int
    median: float
    p90: float
    largest: float
    above_seen: float
    above_kept: float
    decay: float
    rank_of_kept: float | None


@dataclass(frozen=True)
class Answers:
    """Answers of one arm.

    `correct`  [N, Q]
    `loss`     [N, Q]: minus the logarithm of the gold answer's probability, nats
    `updated`  [N, Q]: the key has more than one value
    `first`    [N, Q]: the key has one value, in the first document
    `nbytes`   bytes of the stored transitions of one document in all layers; None where none is stored
    """

    correct: Bools
    loss: Floats
    updated: Bools
    first: Bools
    nbytes: int | None


@dataclass(frozen=True)
class Score:
    """Accuracy and loss of one arm; 95 % intervals from resampled sequences.

    `updated, first`          accuracy on these questions alone; None where there are none
    `minus_full, minus_exact`  accuracy minus that of the reference, by sequence
    """

    arm: str
    accuracy: Interval
    updated: Interval | None
    first: Interval | None
    loss: Interval
    minus_full: Interval
    minus_exact: Interval
    nbytes: int | None


def scores(answers: Mapping[str, Answers], full: str, exact: str) -> list[Score]:
    """Return the score of every arm; the references `full` and `exact` are arms too."""
    return [_score(arm, arm_answers, answers[full], answers[exact]) for arm, arm_answers in answers.items()]


def _score(arm: str, answers: Answers, full: Answers, exact: Answers) -> Score:
    all_questions = np.ones_like(answers.correct)
    minus_full, minus_exact = (answers.correct.astype(float) - reference.correct for reference in (full, exact))
    return Score(
        arm,
        _recall_scores_accuracy(answers.correct, all_questions),
        _recall_scores_accuracy(answers.correct, answers.updated) if answers.updated.any() else None,
        _recall_scores_accuracy(answers.correct, answers.first) if answers.first.any() else None,
        positive_ratio(*_sums(answers.loss, all_questions)),
        ratio(*_sums(minus_full, all_questions)),
        ratio(*_sums(minus_exact, all_questions)),
        answers.nbytes,
    )


def _recall_scores_accuracy(correct: Bools, counted: Bools) -> Interval:
    return share(*_sums(correct, counted))


def _sums(values: NDArray[np.floating] | Bools, counted: Bools) -> tuple[Floats, Floats]:
    """Return sums over the counted questions, and numbers of these, by sequence: [1, N] each."""
    return (values * counted).sum(1, dtype=np.float64)[None], counted.sum(1, dtype=np.float64)[None]


def summarise(norms: Sequence[HeadNorm]) -> list[NormSummary]:
    """Return summaries of the heads by source and length, in order of measurement."""
    by_source: dict[tuple[str, int], list[HeadNorm]] = {}
    for head in norms:
        by_source.setdefault((head.source, head.tokens), []).append(head)
    return [_summary(*key, heads) for key, heads in by_source.items()]


def _summary(source: str, tokens: int, heads: list[HeadNorm]) -> NormSummary:
    norms = np.array([head.norm for head in heads])
    ranks = [head.rank for head in heads if head.norm > KEPT]
    return NormSummary(
        source,
        tokens,
        float(np.median(norms)),
        percentile(norms, 90),
        float(norms.max()),
        float((norms > SEEN).mean()),
        float((norms > KEPT).mean()),
        float(np.median([head.decay for head in heads])),
        float(np.mean(ranks)) if ranks else None,
    )


# ------------------------------------------------------------------------------
# Tables of the probe: training, answers by arm, norms of transitions.
# ------------------------------------------------------------------------------


def _small(value: float) -> Cell:
    return Cell(value, significant(value) if value >= SEEN else f"{value:.0e}")


def _recall_tables_accuracy(share: float, ends: Ends | None) -> str:
    return percent_text(share) if ends is None else f"{percent_text(share)} [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def _points(points: float, ends: Ends | None) -> str:
    return f"{points:+.1f}" if ends is None else f"{points:+.1f} [{ends[0]:.1f}, {ends[1]:.1f}]"


def _difference(name: str, heading: str) -> tuple[Field, ...]:
    """Return the fields of a difference of shares, in points."""

    def in_points(score: Score) -> Interval:
        share: Interval = getattr(score, name)
        low, high = (None if end is None else 100 * end for end in (share.low, share.high))
        return Interval(100 * share.mean, low, high)

    return with_ends(Field(name, heading, estimate(_points), in_points))


_ANSWERS = (
    Field("arm", "arm", word, left=True),
    *with_ends(Field("accuracy", "accuracy", estimate(_recall_tables_accuracy))),
    Field("updated", "updated\nkeys", percent, "updated.mean"),
    Field("first", "keys of the\nfirst document", percent, "first.mean"),
    Field("loss", "gold loss", number_format(".3f"), "loss.mean"),
    *_difference("minus_full", "minus full view,\npoints"),
    *_difference("minus_exact", "minus exact,\npoints"),
    Field("transition_bytes", "A of one\ndocument", byte_size, "nbytes"),
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
    Field("above_seen", f"heads above\n{SEEN:g}", percent),
    Field("above_kept", f"heads above\n{KEPT:g}", percent),
    Field("decay", "median γ", _small),
    Field("rank_of_kept", f"values above {SEEN:g},\nheads above {KEPT:g}", one_decimal),
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


# ------------------------------------------------------------------------------
# Figures of the probe: training, answers by arm, norms of transitions by length.
# ------------------------------------------------------------------------------

_ALL, _UPDATED, _FIRST = "#222222", "#d55e00", "#56b4e9"
_COLOURS = ("#0072b2", "#d55e00", "#117733", "#aa4499")
_LEAST_NORM = 1e-6  # a smaller norm is drawn here


def draw_training(points: Sequence[TrainingPoint], footer: str) -> Figure:
    """Draw loss and accuracy by step, a line for each way in which questions read the documents."""
    figure, [[above], [below]] = style.framed_with(
        footer, "Training of the probe", 2, 1, height=5.5, share=("col", "none"), margins=style.Margins(right=1.6)
    )
    for view, colour in zip(dict.fromkeys(point.read for point in points), _COLOURS, strict=False):
        view_points = [point for point in points if point.read == view]
        steps = [point.step for point in view_points]
        above.plot(steps, [point.loss for point in view_points], color=colour, label=view)
        below.plot(steps, [100 * point.accuracy for point in view_points], color=colour)
    style.label(above, "", "gold loss (nats)")
    style.label(below, "step", "accuracy (%)")
    style.legend_right(above, title="questions read")
    return figure


def draw_answers(cases: Mapping[str, Sequence[Score]], footer: str) -> Figure:
    """Draw a panel per case: accuracy of each arm, over all questions and over two kinds of questions."""
    arms = [score.arm for score in next(iter(cases.values()))]
    figure, [axes] = style.framed_with(
        footer,
        "Accuracy of answers by what questions read of the documents",
        1,
        len(cases),
        height=2.0 + 0.22 * len(arms),
        share=("all", "all"),
        margins=style.Margins(left=0.35 + 0.075 * max(map(len, arms)), top=0.8, bottom=1.35),
        wspace=0.12,
    )
    for ax, (case, scores) in zip(axes, cases.items(), strict=True):
        _draw_case(ax, scores)
        ax.set_title(f"{case.replace('x', ' x ')} tokens", fontsize=9, loc="left", color=style.INK)
        style.label(ax, "accuracy (%)", size=8)
    axes[0].set_yticks(range(len(arms)), arms)
    axes[0].set_ylim(len(arms) - 0.5, -0.5)
    axes[0].legend(loc="upper left", bbox_to_anchor=(0, -0.13), ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_case(ax: Axes, scores: Sequence[Score]) -> None:
    marks = {"updated keys": ("d", _UPDATED), "keys of the first document": ("^", _FIRST)}
    for row, score in enumerate(scores):
        _draw_interval(ax, row, score.accuracy)
        intervals = dict(zip(marks, (score.updated, score.first), strict=True))
        for name, interval in intervals.items():
            if interval is not None:
                marker, colour = marks[name]
                ax.plot(100 * interval.mean, row, marker, color=colour, markersize=4.5, label=None if row else name)
    ax.plot([], [], "o", color=_ALL, markersize=4, label="all questions, 95 % interval")
    ax.set_xlim(-3, 103)


def _draw_interval(ax: Axes, row: int, accuracy: Interval) -> None:
    ends = [100 * end for end in (accuracy.low, accuracy.high) if end is not None]
    ax.plot(ends, [row] * len(ends), color=_ALL, linewidth=2)
    ax.plot(100 * accuracy.mean, row, "o", color=_ALL, markersize=4)


def draw_norms(norms: Sequence[HeadNorm], footer: str) -> Figure:
    """Draw a dot per head: the norm of A by the length of its span, one colour per model."""
    figure, [[ax]] = style.framed_with(
        footer, "Spectral norm of the transition of a span, one dot per head", margins=style.Margins(right=1.5)
    )
    sources = list(dict.fromkeys(head.source for head in norms))
    for number, (source, colour) in enumerate(zip(sources, _COLOURS, strict=False)):
        heads = [head for head in norms if head.source == source]
        shift = 1.08 ** (number - (len(sources) - 1) / 2)
        lengths = [head.tokens * shift for head in heads]
        ax.plot(lengths, [max(head.norm, _LEAST_NORM) for head in heads], "o", color=colour, alpha=0.6, label=source)
    tokens = [head.tokens for head in norms]
    style.log_scale(ax.xaxis, min(tokens), max(tokens))
    ax.set_xticks(sorted(set(tokens)))
    style.log_scale(ax.yaxis, _LEAST_NORM, 1.0)
    style.label(ax, "tokens of the span", f"norm(A), smaller ones at {_LEAST_NORM:g}")
    style.legend_right(ax, title="weights")
    return figure


# ------------------------------------------------------------------------------
# The command line of the three programs.
# ------------------------------------------------------------------------------

PRESETS = Path(__file__).with_name("presets")


def settings_of(schema: type[Any], words: Sequence[str]) -> Any:
    """Return the settings that words such as `steps=100` choose; `training=NAME` first takes a file of `presets`."""
    config = OmegaConf.structured(schema)
    for given in words:
        key, equals, value = given.partition("=")
        if not equals:
            raise ValueError(f"{given}: expected KEY=VALUE")
        if key == "training":
            one_of("training", value, sorted(path.stem for path in PRESETS.glob("*.yaml")))
            config = OmegaConf.merge(config, OmegaConf.load(PRESETS / f"{value}.yaml"))
    changes = [given for given in words if not given.startswith("training=")]
    return OmegaConf.to_object(OmegaConf.merge(config, OmegaConf.from_dotlist(changes)))


def run_program(schema: type[Any], run: Callable[[Any, str, Path], Path]) -> None:
    """Run a program with the settings of its command line; a user's mistake ends it with one sentence."""
    program = Path(sys.argv[0]).stem
    try:
        settings = settings_of(schema, sys.argv[1:])
        name = settings.output.run or folder_name(",".join([program, *sys.argv[1:]]))
        run(settings, name, HOME / settings.output.root)
    except (ValueError, OSError, OmegaConfBaseException) as mistake:
        sys.exit(f"{program}: {sentence(mistake)}")
