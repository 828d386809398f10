"""Settings of every test."""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import hypothesis
import pytest

# Tests look into Python modules; tests/architecture/test_compiled.py runs a part of them on compiled ones.
os.environ.setdefault("SPANLAB_COMPILED", "never")  # before the first of them is imported

# Tests run one per core. A process with threads of torch is not forked, and patches would not reach its workers.
os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported, whose threads would spin

from spanlab import provenance
from spanlab.core.request import Request

from .support.shared import DATA

# Every run tries the same examples, so that an unrelated change never fails; the profile `fuzz` tries random ones.
hypothesis.settings.register_profile("fuzz", print_blob=True)
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

gc.set_threshold(100_000)  # instead of 700: the modules and settings of tests stay alive


@pytest.fixture(scope="module", autouse=True)
def few_to_collect() -> None:
    """Collections of garbage leave out what earlier files imported: studies collect before and after each run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def frozen() -> Iterator[None]:
    """A simulation in this process leaves those objects frozen: a collection among all takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_commit() -> Iterator[None]:
    """Git is asked once: a study asks it six times, and a test of it elsewhere starts its own program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "_git", cache(provenance._git))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_rates() -> Iterator[None]:
    """Readings of the machine, which each study on the engine takes, come from small products, copies and prompts."""
    if "torch" not in sys.modules:  # no test of the engine is among those that were collected
        yield
        return
    from spanlab.engine.load import _COPIED, _PRODUCT
    from spanlab.study import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_PRODUCT, "cpu", (128,))
        patch.setitem(_COPIED, "cpu", 1 << 20)
        patch.setattr(machine, "TOKENS", 16)
        patch.setattr(machine, "REPEATS", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_warm_up() -> Iterator[None]:
    """Arms of a study on the engine warm up with the shortest request alone: it costs as much as the toy itself."""
    if "torch" not in sys.modules:
        yield
        return
    from spanlab.study import backends
    from spanlab.study.jobs import warm_requests

    def shortest(requests: Sequence[Request]) -> list[Request]:
        return warm_requests([min(requests, key=lambda request: request.num_tokens)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "warm_requests", shortest)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real texts, which a checkout alone does not have."""
    if not DATA.is_dir():
        pytest.skip("needs the shared texts")
    return DATA
