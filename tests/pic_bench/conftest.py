"""The benchmark at toy size, and one run of all its arms that many tests look at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from spanlab.bench import rates
from spanlab.bench.rates import Rates
from spanlab.engine.load import ModelChoice, load_model
from spanlab.main import compose
from spanlab.pic_bench import run
from spanlab.pic_bench.ground import Ground, texts_of, tokenizer_of
from spanlab.settings import PicBench
from spanlab.study.noise import Noise

TOY = ("sizes=[xs]", "trials=1", "repeats=3", "question_words=4", "engine.threads=1", "tracking=none")
RATES = Rates(1e11, 1e10)


def make_settings(*overrides: str) -> PicBench:
    return compose("pic_bench", [*TOY, *overrides])


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
def settings() -> Callable[..., PicBench]:
    """Toy settings with overrides, as typed."""
    return make_settings


@pytest.fixture(scope="session")
def ground() -> Ground:
    """A two-layer tiny model whose vocabulary is the built-in tokenizer's."""
    toy = make_settings()
    tokenizer = tokenizer_of(toy, "tiny")
    choice = ModelChoice("tiny", overrides={"vocab_size": tokenizer.vocab_size, "num_hidden_layers": 3})
    model = load_model(choice)
    return Ground("tiny", model, model.spec(), RATES, tokenizer, texts_of(toy))


def read_folder(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return rows, json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A complete run of every arm."""
    with told_machine():
        return run.run_bench(make_settings("output.run=whole"), "pic_bench", tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="session")
def read() -> Callable[[Path], tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Rows and summary of a run's folder."""
    return read_folder
