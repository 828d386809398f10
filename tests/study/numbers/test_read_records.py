"""Records that are read back as columns, and delays and shares of reused tokens, by hand."""

import io
import json
from dataclasses import fields

import numpy as np
import pytest

from spanlab.records import Record, delays_of, tpot, ttft
from spanlab.study.numbers import read_records, reuse_shares

KINDS = {"int": 1, "float": 0.5, "bool": True}


def test_columns_have_the_types_of_their_values():
    plain = {field.name: KINDS.get(str(field.type)) for field in fields(Record)}
    rows = [plain | {"tiers": {"host": 3}}, plain | {"rate_rps": 2.0, "counted": False, "tiers": {"host": 4}}]
    columns = read_records(io.BytesIO(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    assert np.isnan(columns["rate_rps"][0])
    assert columns["rate_rps"][1] == 2.0
    assert columns["counted"].tolist() == [True, False]
    assert columns["counted"].dtype == np.bool_
    assert columns["tiers"].tolist() == [{"host": 3}, {"host": 4}]
    assert {columns[name].dtype for name in ("seed", "arrived_s")} == {np.dtype(np.int64), np.dtype(np.float64)}


# -- The delays of requests, by hand. ---


TIMES = {"arrived_s": [1.0, 2.0], "first_token_s": [1.5, 4.0], "finished_s": [3.5, 4.0], "output_tokens": [5, 1]}
COLUMNS = {name: np.array(values) for name, values in TIMES.items()}


def test_delays_of_records_by_hand():
    delays = delays_of(COLUMNS | {"admitted_s": np.array([1.25, 2.0])})
    expected = {"queue_s": [0.25, 0], "ttft_s": [0.5, 2], "e2e_s": [2.5, 2], "tpot_s": [0.5, np.nan]}
    assert list(delays) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(delays[name], values)


def test_a_client_sees_no_time_in_the_queue():
    assert list(delays_of(COLUMNS)) == ["ttft_s", "e2e_s", "tpot_s"]


@pytest.mark.parametrize(("tokens", "expected"), [(5, 250.0), (1, np.nan)])
def test_delays_of_one_request_in_its_unit(tokens, expected):
    assert ttft(7, 12) == 5
    assert tpot(0, 1000, tokens) == pytest.approx(expected, nan_ok=True)


# -- Shares of reused tokens, by hand. ---


def columns(rows: list[tuple[int, float, int, int]]) -> dict[str, np.ndarray]:
    """Rows of seed, arrival, prompt and reused tokens."""
    names = ("seed", "arrived_s", "prompt_tokens", "reused_tokens")
    return {name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def test_ratio_of_sums_and_mean_of_ratios_differ():
    shares = reuse_shares(columns([(0, 0.0, 1000, 0), (0, 1.0, 100, 90)]))
    assert shares["token_hit_rate"] == 90 / 1100
    assert shares["token_hit_rate_mean"] == pytest.approx(0.45)


def test_halves_show_the_start_on_an_empty_cache():
    rows = [(0, float(index), 100, 0 if index < 2 else 80) for index in range(4)]
    shares = reuse_shares(columns(rows))
    assert shares["token_hit_rate"] == 0.4
    assert shares["token_hit_rate_halves"] == [0.0, 0.8]


def test_halves_follow_arrivals_within_each_seed():
    rows = [(1, 5.0, 100, 90), (0, 0.0, 100, 10), (1, 4.0, 100, 30), (0, 9.0, 100, 70)]
    assert reuse_shares(columns(rows))["token_hit_rate_halves"] == [0.2, 0.8]


def test_a_single_request_lies_in_the_second_half():
    assert reuse_shares(columns([(0, 0.0, 100, 25)]))["token_hit_rate_halves"] == [0.0, 0.25]
