"""Publish profiles: copy them with their figures to calibrate/, where simulations find them, and fill its README.md.

    bash runall.sh -cn calibrate output.run=tiny
    bash runall.sh -cn calibrate model=tiny-hybrid arms=clean output.run=tiny-hybrid
    .venvs/engine/bin/python benchmarks/publish_calibrate.py outputs/designed_shapes/tiny{,-hybrid}

A profile replaces an earlier one of the same model, machine and device; others stay. No number is typed by hand.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pages import HERE, fill_page, table

from spanlab.analyses.fit_profile import file_name
from spanlab_sim.timings import Profile, read_profile

FOLDER = HERE / "calibrate"
FIGURES = ("predicted", "residuals")
HEAD = ("profile", "measured on", "when", "shapes, steps", "error of steps left out: median", "p95", "mean")


def main() -> None:
    """Copy the profiles and fill the page."""
    for run in map(Path, sys.argv[1:]):
        path = FOLDER / file_name(read_profile(run / "profile.json"))
        shutil.copy(run / "profile.json", path)
        path.with_suffix("").mkdir(exist_ok=True)
        for name in FIGURES:
            shutil.copy(run / "figures" / f"{name}.png", path.with_suffix("") / f"{name}.png")
    paths = sorted(FOLDER.glob("*.json"))
    rows = [_row(path, read_profile(path)) for path in paths]
    images = "".join(
        f"![Steps of {path.stem}, predicted against measured]({path.stem}/predicted.png)\n" for path in paths
    )
    fill_page(FOLDER / "README.md", "profiles", f"{table(HEAD, rows)}\n{images}")


def _row(path: Path, profile: Profile) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    threads = f", {profile.threads} thread{'s' * (profile.threads > 1)}" if profile.device == "cpu" else ""
    machine = f"{profile.machine}, {profile.device}{threads}, {profile.dtype}, {versions}"
    errors = [
        f"{100 * profile.left_out[name]:{sign}.1f} %" for name, sign in (("median", ""), ("p95", ""), ("bias", "+"))
    ]
    when = f"{profile.date}, commit {profile.commit}"
    return f"[`{profile.model}`]({path.name})", machine, when, f"{profile.shapes}, {profile.steps}", *errors


if __name__ == "__main__":
    main()
