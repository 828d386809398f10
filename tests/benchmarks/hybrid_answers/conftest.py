"""A small probe of random weights, and documents with questions."""

import numpy as np
import pytest
import torch
from probe_model import Shape, draw, new_probe
from probe_settings import ProbeModel, TaskSettings
from torch import Tensor
from transformers import PreTrainedModel

TASK = TaskSettings(vocabulary=64, keys=25, values=25, questions=3)
Case = tuple[Tensor, Tensor]
SIZES = ProbeModel(groups=2, hidden=32, heads=2, head_dim=16)


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, atol=2e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return new_probe(SIZES, TASK.vocabulary).eval()


@pytest.fixture
def case() -> Case:
    """Three documents and their questions, for two sequences."""
    batch = draw(np.random.default_rng(1), TASK, Shape(documents=3, tokens=13, facts=4), 2)
    return torch.from_numpy(batch.documents), torch.from_numpy(batch.questions)
