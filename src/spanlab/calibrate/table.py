"""A profile in words."""

from __future__ import annotations

from rich.table import Table

from spanlab.report.units import significant
from spanlab_sim.calibrated import Profile


def footer(profile: Profile) -> str:
    """Where the numbers come from, in one line."""
    threads = f", {profile.threads} thread{'s' if profile.threads > 1 else ''}" if profile.device == "cpu" else ""
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    return (
        f"{profile.model}, {profile.dtype} · {profile.machine}, {profile.device}{threads} · {profile.shapes} shapes, "
        f"{profile.steps} steps · {profile.date}, {versions}, commit {profile.commit}"
    )


def left_out_line(profile: Profile) -> str:
    """How far predictions of steps lie off whose shape was left out of the fit."""
    errors = profile.left_out
    return (
        f"shapes left out of the fit: median error {errors['median']:.1%}, p95 {errors['p95']:.1%}, "
        f"mean {errors['bias']:+.1%}"
    )


def as_table(profile: Profile) -> Table:
    """What each term costs; a term without a price was never met, or is paid for by another."""
    table = Table()
    table.add_column("term")
    table.add_column("price, ns per unit", justify="right")
    for name, price in profile.coefficients.items():
        if price > 0:
            table.add_row(name, f"{price:,.0f}" if price >= 1000 else significant(price))
    return table
