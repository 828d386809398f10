"""Training of the probe: initial weights, memory kinds of a step, learning."""

import math

import numpy as np
import pytest
import torch
from probe_model import PROBE_DT, initial_model, mixers, new_probe
from probe_settings import ProbeModel, TaskSettings, TrainProbe
from train_probe import train

SMALL = TrainProbe(
    task=TaskSettings(vocabulary=64, keys=25, values=25, questions=4),
    model=ProbeModel(groups=1, hidden=32, heads=2, head_dim=16),
    steps=60,
    batch_tokens=600,
    documents=1,
    shortest=9,
    longest=9,
    fewest_facts=2,
    most_facts=2,
    every=30,
)


def settings(**changes: object) -> TrainProbe:
    return TrainProbe(**vars(SMALL) | changes)


def test_probe_has_a_million_parameters():
    assert 0.9e6 < new_probe(ProbeModel(), TaskSettings().vocabulary).num_parameters() < 1.1e6


def test_new_probe_forgets_slowly():
    mixer = mixers(initial_model(SMALL))[0]
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    assert PROBE_DT[0] * 0.99 <= steps.min() <= steps.max() <= PROBE_DT[1] * 1.01


def test_training_learns_to_recall():
    first, last = [point for point in train(initial_model(SMALL), settings(hidden_kv=0.0)) if point.read == "all"]
    assert last.loss < 0.5 * first.loss
    assert last.accuracy > 0.5 > 3 / SMALL.task.values


@pytest.mark.parametrize(
    ("shares", "memory_kinds"),
    [
        ({"hidden_kv": 1.0}, {"no KV"}),
        ({"hidden_kv": 0.0, "isolated": 1.0}, {"spans"}),
        ({"hidden_kv": 0.0, "empty_state": 1.0}, {"spans, no state"}),
        ({"hidden_kv": 0.5, "isolated": 0.5}, {"no KV", "spans"}),
    ],
)
def test_shares_set_the_memory_kinds(shares: dict[str, float], memory_kinds: set[str]):
    points = list(train(initial_model(SMALL), settings(steps=8, every=8, **shares)))
    assert {point.read for point in points} == memory_kinds
    assert sum(point.steps for point in points) == 8
    assert all(math.isfinite(point.loss) for point in points)


def test_same_seed_trains_the_same():
    runs = [[vars(point) for point in train(initial_model(SMALL), settings(steps=4, every=2))] for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != [
        vars(point) for point in train(initial_model(settings(seed=1)), settings(steps=4, every=2, seed=1))
    ]


def test_training_continues_from_saved_weights(tmp_path):
    model = initial_model(SMALL)
    model.save_pretrained(tmp_path)
    again = initial_model(settings(start=str(tmp_path)))
    assert all(torch.equal(saved, loaded) for saved, loaded in zip(model.parameters(), again.parameters(), strict=True))


def test_weights_of_other_sizes_are_refused(tmp_path):
    initial_model(SMALL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^start=.*: expected num_hidden_layers of 8, as model and task say, not 4"):
        initial_model(settings(start=str(tmp_path), model=ProbeModel(2, 32, 2, 16)))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("isolated", 0.9, "hidden_kv + isolated + empty_state=1.25: expected at most 1"),
        ("shortest", 4, "shortest=4: expected 5"),
        ("most_facts", 1, "most_facts=1: expected fewest_facts=2"),
        ("documents", 40, "task.keys=25: expected 81 keys and values or more"),
        ("steps", 0, "steps=0: expected a number above zero"),
    ],
)
def test_settings_that_make_no_sense_are_refused(key: str, value: float, expected: str):
    with pytest.raises(ValueError, match="expected") as refused:
        settings(**{key: value})
    assert str(refused.value).startswith(expected)


def test_vocabulary_without_room_for_filler_is_refused():
    with pytest.raises(ValueError, match="expected 403 or more"):
        TaskSettings(vocabulary=np.int64(402).item())
