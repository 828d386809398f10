"""The delays of requests, by hand."""

import numpy as np
import pytest

from spanlab.records import delays_of, tpot, ttft

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
