"""Tables hold the cosine and sine of every position, for every kind of fixed frequencies."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spanlab_kernels.blocks import angle_table, rotate
from spanlab_kernels.testing import inverse_powers, random_tensor

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
}


def frequencies_of(kind):
    parameters = {"rope_type": kind, "rope_theta": 500_000.0} | SCALINGS[kind]
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131_072, rope_parameters=parameters
    )
    if kind == "default":  # the one kind that transformers defines inside its models
        return inverse_powers(128, 500_000.0).float()
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0]


@pytest.mark.parametrize("kind", SCALINGS)
def test_every_position_to_a_million_is_exact_to_rounding(kind):
    frequencies = frequencies_of(kind)
    subset = frequencies[:: len(frequencies) // 4]  # a million positions of all tables would be a gigabyte
    table = angle_table(subset, 1_000_001)
    positions = np.array([0, 1, 2, 4095, 131_072, 524_287, 999_999, 1_000_000])
    angles = np.outer(positions, subset.double().numpy()).astype(np.longdouble)
    unit = np.finfo(np.float32).eps
    assert np.abs(table.cos[positions].numpy() - np.cos(angles)).max() <= unit / 2
    assert np.abs(table.sin[positions].numpy() - np.sin(angles)).max() <= unit / 2


@pytest.mark.parametrize("kind", SCALINGS)
def test_scores_depend_on_distance_alone_even_a_hundred_thousand_positions_on(kind):
    table = angle_table(frequencies_of(kind), 110_000)
    query, key = random_tensor(1, 1, 128, seed=1), random_tensor(1, 1, 128, seed=2)

    def score(query_at, key_at):
        return float((rotate(query, query_at, table) * rotate(key, key_at, table)).sum())

    for near, far in ((5, 0), (731, 60), (4096, 4095)):
        assert score(near + 100_000, far + 100_000) == pytest.approx(score(near, far), abs=2e-5)


def test_kinds_of_frequencies_differ():
    first = [frequencies_of(kind) for kind in SCALINGS]
    assert all(not torch.equal(first[0], other) for other in first[1:])


def test_a_negative_shift_rotates_backwards():
    table = angle_table(inverse_powers(8), 12)
    shift = torch.tensor([[-11, 0], [3, -3]], dtype=torch.int32)
    cos, sin = table.lookup(shift)
    assert torch.equal(cos, table.cos[shift.abs()])
    assert torch.equal(sin[0, 0], -table.sin[11])
    assert torch.equal(sin[1], torch.stack((table.sin[3], -table.sin[3])))
    assert (table.length, table.rotary_dim) == (12, 8)


def test_no_position_is_formed_in_half_precision():
    # bfloat16 has no integer between 256 and 258
    table = angle_table(inverse_powers(2).to(torch.bfloat16), 300)
    assert float(table.cos[257, 0]) == pytest.approx(math.cos(257), abs=1e-7)


@pytest.mark.parametrize(
    ("frequencies", "length", "message"),
    [
        (torch.ones(2, 2), 4, "frequencies"),
        (torch.ones(2, dtype=torch.int64), 4, "frequencies"),
        (torch.ones(0), 4, "frequencies"),
        (torch.tensor([1.0, torch.inf]), 4, "frequencies"),
        (torch.ones(2), 0, "length must be at least 1, not 0"),
    ],
)
def test_invalid_tables_are_refused(frequencies, length, message):
    with pytest.raises(ValueError, match=message):
        angle_table(frequencies, length)
