"""Models that the engine's tests share: random ones, made once, and a small trained one."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from spanlab.engine.load import random_model, wrap
from spanlab.engine.model import SpanModel

from ..support.shared import MODELS
from .factories import family_config, make_choice
from .llama2c import read_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small products gain nothing from threads, and sums do not depend on how many there are."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., SpanModel]:
    """A random model in float32 by name, the same object for every call; not to be changed."""
    return cache(make_choice)


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3", "mistral"])
def model(request: pytest.FixtureRequest) -> SpanModel:
    """A random model of each family."""
    return random_model(request.param, family_config(request.param))


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward of a model."""
    rows, forward = [], SpanModel.forward

    def counted(model: SpanModel, ids: Tensor, *given: object, **named: object) -> Tensor:
        rows.append(len(ids))
        return forward(model, ids, *given, **named)

    monkeypatch.setattr(SpanModel, "forward", counted)
    return rows


@pytest.fixture(scope="session")
def stories() -> SpanModel:
    """260 thousand trained parameters that tell stories, in pieces of words."""
    if not MODELS.is_dir():
        pytest.skip("needs the shared models")
    return wrap("stories260K", read_model(MODELS / "stories260K" / "stories260K.bin"))
