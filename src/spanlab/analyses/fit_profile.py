"""The analysis `fit_profile`: fit the coefficients of a timing model to step times of designed
shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from spanlab.analyses.base import Findings, Finished
from spanlab.build import profile_folder
from spanlab.core.step import StepFeatures
from spanlab.provenance import PACKAGES_OF, commit, machine
from spanlab.report import style
from spanlab.report.table import Cell, Field, Table, significant, tabulate, word
from spanlab.settings.analyses import ANALYSES, MEASURED, Analysis
from spanlab.settings.study import Study
from spanlab.study.folder import slug
from spanlab.study.jobs import shape_numbers
from spanlab.study.logs import read_steps
from spanlab.study.machine import EngineFacts
from spanlab.study.numbers import ArmFiles, RunCell
from spanlab_sim.timings import TERMS, Profile, read_profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Storing a profile for studies on this machine.
# ------------------------------------------------------------------------------

# median error at shapes left out of the fit: a calm machine has some 6 %
CROSS_VALIDATION_LIMIT = 0.10


def store_profile(profile: Profile, root: Path) -> str:
    """Store a profile for studies on this machine; return one sentence about the result.

    A profile from a noisy machine is not stored, and an existing profile stays.
    """
    path = profile_folder(root) / file_name(profile)
    error = profile.left_out["median"]
    if not error <= CROSS_VALIDATION_LIMIT:
        stays = f"the one of {read_profile(path).date} stays" if path.exists() else "none is stored"
        limit = f"{CROSS_VALIDATION_LIMIT:.0%} is the limit"
        return f"noisy machine, profile not kept: median error {error:.1%} at shapes left out, {limit}; {stays}"
    profile.write(path)
    return f"kept for the simulator (timing=calibrated): {path}"


def file_name(profile: Profile) -> str:
    """File name of a profile: one file for each model, machine and device."""
    return f"{slug(profile.model)}-{slug(profile.machine)}-{slug(profile.device)}.json"


# ------------------------------------------------------------------------------
# Measured steps: their features, and their duration in each repeat.
# ------------------------------------------------------------------------------


class StepId(NamedTuple):
    """One step of a design: the number of its shape, and its number within the shape."""

    shape: int
    step: int


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step: nanoseconds in each repeat, counted from the end of the step before."""

    step_id: StepId
    arm: str
    features: StepFeatures
    cycles_ns: tuple[int, ...]

    @property
    def mean_ns(self) -> float:
        """Mean over repeats, in nanoseconds."""
        return fmean(self.cycles_ns)

    @property
    def median_ns(self) -> float:
        """Median over repeats, in nanoseconds, which occasional interruptions of the machine do not
        change."""
        return median(self.cycles_ns)

    def row(self) -> dict[str, Any]:
        """Return the step as one flat row."""
        return {
            **self.step_id._asdict(),
            "arm": self.arm,
            **self.features._asdict(),
            "cycles_ns": self.cycles_ns,
        }


# ------------------------------------------------------------------------------
# Text and table of a calibrated profile.
# ------------------------------------------------------------------------------


def footer(profile: Profile) -> str:
    """Return the provenance of a profile in one line."""
    threads = (
        f", {profile.threads} thread{'s' if profile.threads > 1 else ''}"
        if profile.device == "cpu"
        else ""
    )
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    return (
        f"{profile.model}, {profile.dtype} · {profile.machine}, {profile.device}{threads} · {profile.shapes} shapes, "
        f"{profile.steps} steps · {profile.date}, {versions}, commit {profile.commit}"
    )


def cross_validation_line(profile: Profile) -> str:
    """Return the errors of predictions for steps whose shape was left out of the fit."""
    errors = profile.left_out
    return (
        f"shapes left out of the fit: median error {errors['median']:.1%}, p95 {errors['p95']:.1%}, "
        f"mean {errors['bias']:+.1%}"
    )


def profile_table(profile: Profile, notes: tuple[str, ...]) -> Table:
    """Return the cost of each term; a term without a cost was never measured, or another term
    covers it."""
    fields = (
        Field("term", "term", word, left=True),
        Field(
            "price_ns",
            "coefficient, ns per unit",
            lambda price: Cell(price, f"{price:,.0f}" if price >= 1000 else significant(price)),
        ),
    )
    rows = [
        {"term": name, "price_ns": price}
        for name, price in profile.coefficients.items()
        if price > 0
    ]
    return tabulate(
        "profile", f"{footer(profile)}\n{cross_validation_line(profile)}", fields, rows, notes
    )


# ------------------------------------------------------------------------------
# Errors of predicted step times, by the amount of each kind of work in a step.
# ------------------------------------------------------------------------------

_COLS = 4
_COLOUR = "#0072b2"


def draw_residuals(points: Sequence[Point], errors: NDArray[np.float64], footer: str) -> Figure:
    """Draw a plot per varying term, of steps with a positive count; errors are of shapes left out
    of the fit."""
    counts = {
        name: np.array([term(point.features) for point in points]) for name, term in TERMS.items()
    }
    varying = {name: count for name, count in counts.items() if count.min() < count.max()}
    figure, axes = style.panels(
        footer,
        "Error of predicted step times by what a step does (steps whose shape was left out of the fit)",
        len(varying),
        _COLS,
        (1.4, 1.6),
        share=("none", "all"),
        margins=style.Margins(top=0.6),
        hspace=0.75,
        wspace=0.12,
    )
    for ax, (name, count) in zip(axes, varying.items(), strict=True):
        some = count > 0
        ax.plot(count[some], 100 * errors[some], ".", color=_COLOUR, markersize=3, alpha=0.5)
        ax.axhline(0, color=style.INK, linewidth=0.8)
        # small: room for few ticks
        style.log_scale(ax.xaxis, float(count[some].min()), 1e3 * float(count[some].max()))
        ax.set_title(name, fontsize=8, loc="left", color=style.INK, pad=3)
        ax.tick_params(labelsize=7)
    below = 0.45 / figure.get_figheight()
    figure.supxlabel(
        "units of the term in one step", fontsize=style.LABEL_PT, color=style.INK, y=below
    )
    figure.supylabel(
        "predicted ÷ measured - 1 (%)", fontsize=style.LABEL_PT, color=style.INK, x=0.01
    )
    return figure


# ------------------------------------------------------------------------------
# Predicted and measured step times.
# ------------------------------------------------------------------------------

#: Kinds of steps: prompts, prompts while other requests decode, or decoding alone.
KINDS: dict[str, tuple[Callable[[StepFeatures], bool | int], str, str]] = {
    "prefill": (lambda step: not step.num_decodes, "#0072b2", "o"),
    "prefill and decode": (lambda step: step.num_prefills and step.num_decodes, "#e69f00", "^"),
    "decode": (lambda step: not step.num_prefills, "#d55e00", "s"),
}


def draw_step_times(points: Sequence[Point], errors: NDArray[np.float64], footer: str) -> Figure:
    """Draw one point per step, predicted by coefficients fitted without its shape, with a line of
    equality."""
    figure, [[ax]] = style.framed_with(
        footer,
        "Time of a step, predicted without its shape and measured",
        margins=style.margins_for([*KINDS, "±10 %"]),
    )
    measured = np.array([point.mean_ns for point in points]) * 1e-9
    predicted = measured * (1 + errors)
    unit = style.time_unit(float(measured.max()))
    for name, (is_kind, colour, marker) in KINDS.items():
        mask = np.array([bool(is_kind(point.features)) for point in points])
        ax.plot(
            measured[mask] * unit.factor,
            predicted[mask] * unit.factor,
            color=colour,
            marker=marker,
            markersize=4,
            alpha=0.6,
            markeredgewidth=0,
            linestyle="",
            label=name,
        )
    low, high = style.positive_range(np.concatenate([measured, predicted]) * unit.factor)
    line = np.array([low / 1.2, high * 1.2])
    ax.plot(line, line, color=style.INK, linewidth=1.0, label="equal")
    ax.fill_between(
        line, line * 0.9, line * 1.1, color=style.INK, alpha=0.08, linewidth=0, label="±10 %"
    )
    for axis in (ax.xaxis, ax.yaxis):
        style.log_scale(axis, low, high)
    ax.set_xlim(*line)
    ax.set_ylim(*line)
    style.label(ax, f"measured, mean of repeats ({unit.name})", f"predicted ({unit.name})")
    style.legend_right(ax)
    return figure


FIGURES = {"predicted": draw_step_times, "residuals": draw_residuals}


def fit_profile(finished: Finished) -> Findings:
    """Fit the profile, and store it for simulations unless the machine was noisy or an arm
    failed."""

    assert finished.facts is not None, "shapes run on the engine"
    points = points_of(finished.study, finished.files)
    errors = cross_validation_errors(points)
    profile = profile_from_points(finished.study, finished.facts, points)
    profile.write(finished.folder / "profile.json")
    # write every fitted step with its cross-validation error
    pairs = zip(points, errors.tolist(), strict=True)
    rows = [point.row() | {"left_out_error": error} for point, error in pairs]
    (finished.folder / "steps.jsonl").write_bytes(
        b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    )
    storage_note = (
        f"profile not kept, for it lacks arms: {', '.join(finished.failed)}"
        if finished.failed
        else store_profile(profile, finished.root)
    )
    noise = finished.noise_sentence("conclusions")
    quality = f"{cross_validation_line(profile)} · {footer(profile)}"
    return Findings(
        summary={"fit_profile": {"profile": asdict(profile), "kept": storage_note}},
        tables=(
            profile_table(
                profile, (storage_note, *finished.failed.values(), *filter(None, [noise]))
            ),
        ),
        figures={
            name: partial(drawing, points, errors, quality) for name, drawing in FIGURES.items()
        },
        caveats=tuple(filter(None, [noise])),
    )


def points_of(study: Study, files: Mapping[str, ArmFiles]) -> list[Point]:
    """Return every step of a calibration's shapes, sorted by shape and step, with its time in each
    repeat."""
    shapes, points = [(arm, number) for arm in files for number in shape_numbers(study, arm)], []
    for arm, number in shapes:
        cells = [
            RunCell(number, None, repeat)
            for repeat in range(study.analyses.compare_backends.repeats)
        ]
        logs = [read_steps(files[arm].log(arm, cell)) for cell in cells]
        for index, repeats in enumerate(zip(*logs, strict=True)):
            is_same = all(step.features == repeats[0].features for step in repeats)
            assert is_same, "repeats of a shape compose the same steps"
            times = tuple(step.took_ns for step in repeats)
            points.append(Point(StepId(number, index), arm, repeats[0].features, times))
    return sorted(points, key=lambda point: point.step_id)


def profile_from_points(study: Study, facts: EngineFacts, points: Sequence[Point]) -> Profile:
    """Fit coefficients to the points of a calibration; the profile includes errors, machine, date
    and commit."""

    errors = cross_validation_errors(points)
    magnitude = np.abs(errors)
    assert study.analyses.compare_backends.longest is not None, "a calibration has limits"
    return Profile(
        model=study.model.name,
        machine=machine(),
        device="cpu" if facts.kind == "cpu" else facts.device,
        threads=facts.threads,
        dtype=facts.dtype,
        versions={
            name: version
            for name, version in facts.versions.items()
            if name in PACKAGES_OF["engine"]
        },
        date=datetime.now(UTC).date().isoformat(),
        commit=commit(),
        coefficients=fit(points),
        hull=hull(points),
        left_out={
            "median": float(np.median(magnitude)),
            "p95": float(np.quantile(magnitude, 0.95)),
            "bias": float(errors.mean()),
        },
        shapes=len({point.step_id.shape for point in points}),
        steps=len(points),
        longest=study.analyses.compare_backends.longest,
    )


# ------------------------------------------------------------------------------
# Coefficients of step times by non-negative least squares of relative errors, cross-validated
# by shape.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]


def fit(points: Sequence[Point]) -> dict[str, float]:
    """Return nanoseconds per unit of every term, none below zero.

    The coefficients minimise the sum of squared relative errors to the medians of steps. Then one
    common factor scales them to the total time of all repeats: medians compare steps whatever else
    the machine did, but queues depend on the mean, bursts included (a smearing factor: Duan, JASA
    1983).
    """
    coefficients = _coefficients(_counts(points), _medians(points), _means(points))
    return dict(zip(TERMS, coefficients.tolist(), strict=True))


def cross_validation_errors(points: Sequence[Point]) -> Floats:
    """Return the relative error of every point, predicted / measured - 1, by a fit to all shapes
    but its own."""
    counts, medians, means = _counts(points), _medians(points), _means(points)
    shape = np.array([point.step_id.shape for point in points])
    errors = np.empty(len(points))
    for test_shape in np.unique(shape):
        test, train = shape == test_shape, shape != test_shape
        errors[test] = (
            counts[test] @ _coefficients(counts[train], medians[train], means[train]) / means[test]
            - 1
        )
    return errors


def hull(points: Sequence[Point]) -> dict[str, tuple[int, int]]:
    """Return the least and the greatest value of every feature."""
    columns = zip(*(point.features for point in points), strict=True)
    return {
        name: (min(values), max(values))
        for name, values in zip(StepFeatures._fields, columns, strict=True)
    }


def _counts(points: Sequence[Point]) -> Floats:
    return np.array(
        [[term(point.features) for term in TERMS.values()] for point in points], np.float64
    )


def _medians(points: Sequence[Point]) -> Floats:
    return np.array([point.median_ns for point in points])


def _means(points: Sequence[Point]) -> Floats:
    return np.array([point.mean_ns for point in points])


def _coefficients(counts: Floats, medians: Floats, means: Floats) -> Floats:
    """Fit with rows divided by measured times, for relative errors, and columns by their maximum,
    for conditioning."""
    rows = counts / medians[:, None]
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    from scipy.optimize import nnls  # here, because its import takes longer than a small study

    coefficients, _ = nnls(rows / scale, np.ones(len(rows)))
    fitted: Floats = coefficients / scale
    scaled: Floats = fitted * (means.sum() / (counts @ fitted).sum())
    return scaled


ANALYSES.add(Analysis("fit_profile", fit_profile, needs=(MEASURED,)))
