"""Text and table of a calibrated profile."""

from __future__ import annotations

from spanlab.report.cells import word
from spanlab.report.fields import Field, tabulate
from spanlab.report.tables import Cell, Table
from spanlab.report.units import significant
from spanlab_sim.calibrated import Profile


def footer(profile: Profile) -> str:
    """Return the provenance of a profile in one line."""
    threads = f", {profile.threads} thread{'s' if profile.threads > 1 else ''}" if profile.device == "cpu" else ""
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
    """Return the cost of each term; a term without a cost was never measured, or another term covers it."""
    fields = (Field("term", "term", word, left=True), Field("price_ns", "coefficient, ns per unit", _price))
    rows = [{"term": name, "price_ns": price} for name, price in profile.coefficients.items() if price > 0]
    return tabulate("profile", f"{footer(profile)}\n{cross_validation_line(profile)}", fields, rows, notes)


def _price(price: float) -> Cell:
    return Cell(price, f"{price:,.0f}" if price >= 1000 else significant(price))
