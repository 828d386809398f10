"""Profiles on disk: their folder, the search for one that matches a study, and the reason of a mismatch."""

from __future__ import annotations

import re
from pathlib import Path

from spanlab.compiled import HOME
from spanlab.engine.settings import dtype_of
from spanlab.settings import Study
from spanlab.study.output.provenance import machine
from spanlab_sim.calibrated import Profile, read_profile

CROSS_VALIDATION_LIMIT = 0.10  # median error at shapes left out of the fit: a calm machine has some 6 %
PUBLISHED = HOME / "benchmarks" / "calibrate"


def profile_of(study: Study) -> Profile:
    """Return the profile that a study names, or a matching one; ValueError for a mismatch, or where none exists."""
    if study.timing.profile is not None:
        path = Path(study.timing.profile)
        profile = read_profile(path)
        if difference := mismatch(profile, study):
            raise ValueError(f"timing.profile={path}: {difference}")
        return profile
    matching = local_profile(study) or _matching_profile(study, PUBLISHED)
    if matching is None:
        name = study.model.name
        command = f"bash runall.sh -cn calibrate model={name}" + (" arms=clean" if study.model.is_hybrid else "")
        raise ValueError(
            f"timing.profile is not set, and no profile of {name} on {machine()} exists: "
            f"expected one, as `{command}` creates it"
        )
    return matching


def local_profile(study: Study) -> Profile | None:
    """Return the profile of this model in the folder of outputs; None without one.

    A published profile with the same machine name may come from another machine.
    """
    return _matching_profile(study, profile_folder(HOME / study.output.root))


def _matching_profile(study: Study, folder: Path) -> Profile | None:
    for path in sorted(folder.glob("*.json")):
        profile = read_profile(path)
        if not mismatch(profile, study):
            return profile
    return None


def mismatch(profile: Profile, study: Study) -> str:
    """Describe why a profile does not match this study's model and this machine; empty where it matches."""
    model, engine = study.model, study.engine
    pairs = [
        ("model", profile.model, model.name),
        ("machine", profile.machine, machine()),
        ("dtype", profile.dtype, dtype_of(model)),
    ]
    if engine.device != "auto":
        kind = "cpu" if profile.device == "cpu" else "cuda"
        pairs.append(("device", kind, engine.device.partition(":")[0]))
    if engine.threads is not None:
        pairs.append(("threads", str(profile.threads), str(engine.threads)))
    for name, measured, expected in pairs:
        if measured != expected:
            return f"it was measured with {name} {measured}; expected {name} {expected}"
    return ""


def profile_folder(root: Path) -> Path:
    """Folder of stored profiles below the output root."""
    return root / "profiles"


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


def slug(text: str) -> str:
    """Convert a text to a name that is valid in any file system."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
