"""Choose the environment with the packages that settings need, and restart the program in it."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from spanlab.compiled import HOME, restart_as
from spanlab.models.packaged import ENVIRONMENT
from spanlab.settings import Study
from spanlab.settings.conformance import Conformance
from spanlab.settings.first_light import FirstLight
from spanlab.settings.packaged import lacks_package
from spanlab.settings.probe import HybridAnswers, TrainProbe
from spanlab.settings.tail_replay import TailReplay


def ensure_environment(settings: object) -> None:
    """Restart the program if the settings need another environment, or compiled modules."""
    environment = needed_environment(settings)
    if environment is not None:
        start_in(environment)
    if isinstance(settings, Study):
        restart_as(settings.compiled)


def needed_environment(settings: object) -> str | None:
    """Return the environment that settings need; None if this one has all packages."""
    if isinstance(settings, (TrainProbe, HybridAnswers, TailReplay, Conformance, FirstLight)):
        return None if find_spec("torch") else "engine"
    if not isinstance(settings, Study):
        return None
    if lacks_package(settings):
        return ENVIRONMENT
    if settings.backend == "engine":
        return None if find_spec("torch") else "engine"
    if settings.executor.kind == "dask":
        return None if find_spec("distributed") else "cluster"
    return None


def start_in(environment: str) -> None:
    """Restart by runall.sh in another environment; return if runall.sh did not start this program."""
    if os.environ.get("SPANLAB_ENVIRONMENT", environment) != environment:
        script = str(HOME / "runall.sh")
        os.execvpe("bash", ["bash", script, *sys.argv[1:]], os.environ | {"SPANLAB_ENVIRONMENT": environment})
