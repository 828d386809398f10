"""Models that the engine's tests share: random ones, made once, and two small trained ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from spanlab.engine.load import wrap
from spanlab.engine.model import SpanModel

from ..support.shared import MODELS
from .factories import make_choice
from .llama2c import read_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small products gain nothing from threads, and sums do not depend on how many there are."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., SpanModel]:
    """A random model in float32 by name, the same one each time it is asked for; not to be changed."""
    return cache(make_choice)


@pytest.fixture(scope="session", params=["tiny", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def model(request: pytest.FixtureRequest, make_model: Callable[..., SpanModel]) -> SpanModel:
    """A random model of each family."""
    return make_model(request.param)


def _trained(name: str, file: str) -> SpanModel:
    if not MODELS.is_dir():
        pytest.skip("needs the shared models")
    return wrap(name, read_model(MODELS / name / file))


@pytest.fixture(scope="session")
def stories() -> SpanModel:
    """260 thousand trained parameters that tell stories, in pieces of words."""
    return _trained("stories260K", "stories260K.bin")


@pytest.fixture(scope="session")
def babyllama() -> SpanModel:
    """936 thousand trained parameters that tell stories, letter by letter."""
    return _trained("babyllama-tok105", "model5000.bin")
