"""Profiles on disk: where they lie, which one a study may use, and why not another."""

from __future__ import annotations

import re
from pathlib import Path

from spanlab.engine.settings import dtype_of
from spanlab.settings import Study
from spanlab.study.output.provenance import HOME, machine
from spanlab_sim.calibrated import Profile, read_profile

CROSS_VALIDATION_LIMIT = 0.10  # median error at shapes left out of the fit: a calm machine has some 6 %
PUBLISHED = HOME / "benchmarks" / "calibrate"


def profile_of(study: Study) -> Profile:
    """The profile that a study names, or one that fits it; ValueError where it names another's, or none is found."""
    if study.timing.profile is not None:
        path = Path(study.timing.profile)
        profile = read_profile(path)
        if fault := misfit(profile, study):
            raise ValueError(f"timing.profile={path}: {fault}")
        return profile
    found = local_profile(study) or _fitting(study, PUBLISHED)
    if found is None:
        name = study.model.name
        command = f"bash runall.sh -cn calibrate model={name}" + (" arms=clean" if study.model.is_hybrid else "")
        raise ValueError(
            f"timing.profile is not set, and no profile of {name} on {machine()} is there: "
            f"expected one, as `{command}` makes it"
        )
    return found


def local_profile(study: Study) -> Profile | None:
    """The profile of this model that a run of ours left; None without one.

    A published one was measured on a machine of the same name, which may be another all the same.
    """
    return _fitting(study, kept_in(HOME / study.output.root))


def _fitting(study: Study, folder: Path) -> Profile | None:
    for path in sorted(folder.glob("*.json")):
        profile = read_profile(path)
        if not misfit(profile, study):
            return profile
    return None


def misfit(profile: Profile, study: Study) -> str:
    """Why a profile is not one of this study's model on this machine, in words; empty where it is."""
    asked, engine = study.model, study.engine
    pairs = [
        ("model", profile.model, asked.name),
        ("machine", profile.machine, machine()),
        ("dtype", profile.dtype, dtype_of(asked)),
    ]
    if engine.device != "auto":
        kind = "cpu" if profile.device == "cpu" else "cuda"
        pairs.append(("device", kind, engine.device.partition(":")[0]))
    if engine.threads is not None:
        pairs.append(("threads", str(profile.threads), str(engine.threads)))
    for what, theirs, ours in pairs:
        if theirs != ours:
            return f"it was measured with {what} {theirs}; expected {what} {ours}"
    return ""


def kept_in(root: Path) -> Path:
    """The folder below the outputs where profiles are looked for."""
    return root / "profiles"


def keep(profile: Profile, root: Path) -> str:
    """Put a profile where studies on this machine find it; returns what was done, in one sentence.

    One that was measured on a noisy machine is refused, and the profile that is there stays.
    """
    path = kept_in(root) / file_name(profile)
    error = profile.left_out["median"]
    if not error <= CROSS_VALIDATION_LIMIT:
        stays = f"the one of {read_profile(path).date} stays" if path.exists() else "none is stored"
        limit = f"{CROSS_VALIDATION_LIMIT:.0%} is the limit"
        return f"noisy machine, profile not kept: median error {error:.1%} at shapes left out, {limit}; {stays}"
    profile.write(path)
    return f"kept for the simulator (timing=calibrated): {path}"


def file_name(profile: Profile) -> str:
    """One file for each model, machine and device."""
    return f"{slug(profile.model)}-{slug(profile.machine)}-{slug(profile.device)}.json"


def slug(words: str) -> str:
    """A name that any file system takes."""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")
