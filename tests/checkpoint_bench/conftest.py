"""The benchmark at toy size, one run of all its arms that many tests look at, and made-up rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from spanlab.bench import rates
from spanlab.bench.bed import Bed
from spanlab.bench.rates import Rates
from spanlab.checkpoint_bench import run
from spanlab.checkpoint_bench.rows import Row
from spanlab.main import compose
from spanlab.settings import CheckpointBench
from spanlab.study.noise import Noise

TOY = ("lengths=[256]", "depths=[0.5,0.8]", "rounds=1", "only=[]", "engine.threads=1", "tracking=none")
RATES = Rates(1e11, 1e10)


def make_settings(*overrides: str) -> CheckpointBench:
    return compose("checkpoint_bench", [*TOY, *overrides])


def make_row(**told: Any) -> Row:
    """A row of zeros but for what is told."""
    unset = {field.name: 0 for field in fields(Row)} | {"model": "tiny-hybrid", "length": 1024, "bound_s": 1.0}
    return Row(**(unset | told))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small products gain nothing from threads."""
    torch.set_num_threads(1)


@contextmanager
def told_machine() -> Iterator[None]:
    """Rates are told, since measuring takes a second and differs each time; nothing is withheld as too noisy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "measure", lambda dtype, device: RATES)
        patch.setattr(Noise, "reasons", lambda noise: [])
        yield


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    """Each test's machine. Fixtures of a longer life enter `told_machine` themselves."""
    with told_machine():
        yield


@pytest.fixture(scope="session")
def settings() -> Callable[..., CheckpointBench]:
    """Toy settings with overrides, as typed."""
    return make_settings


@pytest.fixture(scope="session")
def row() -> Callable[..., Row]:
    """`make_row`."""
    return make_row


@pytest.fixture(scope="session")
def bed() -> Bed:
    """The built-in hybrid."""
    with told_machine():
        return run.lay_bed(make_settings(), "tiny-hybrid")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A complete run of every arm."""
    with told_machine():
        root = tmp_path_factory.mktemp("outputs")
        return run.run_bench(make_settings("output.run=whole"), "checkpoint_bench", root)


@pytest.fixture(scope="session")
def read() -> Callable[[Path], tuple[list[Row], dict[str, Any]]]:
    """Rows and summary of a run's folder."""

    def read_folder(folder: Path) -> tuple[list[Row], dict[str, Any]]:
        rows = [Row(**json.loads(line)) for line in (folder / "rows.jsonl").read_text().splitlines()]
        return rows, json.loads((folder / "summary.json").read_text())

    return read_folder
