"""Strings of token ids cut, join and compare as the lists of their tokens do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.core.token_string import BlockWeights, IdRun, TokenString, string_of

from .factories import common

SHARED = [np.arange(6, dtype=np.int32) % 2, np.array([0, 1, 0], np.int32), np.zeros(4, np.int32)]
SHARED += [IdRun(0, 5), IdRun(1, 3), IdRun(0, 4, 0), IdRun(-2, 5)]


def ids(string: TokenString) -> list[int]:
    return np.frombuffer(string.tobytes(), np.int32).tolist()


@st.composite
def strings(draw) -> TokenString:
    """Joined cuts of arrays and runs that other strings share, or that equal those of others in content alone."""
    string = string_of([])
    for _ in range(draw(st.integers(0, 4))):
        array = draw(st.sampled_from(SHARED))
        start, stop = sorted(draw(st.tuples(st.integers(0, len(array)), st.integers(0, len(array)))))
        equal = np.array(array) if draw(st.booleans()) else array
        string = string + string_of([equal]).cut(start, stop)
    return string


@given(strings(), strings(), st.data())
def test_common_prefix_counts_equal_tokens(a, b, data):
    start = data.draw(st.integers(0, len(a)))
    assert a.common(start, b) == common(ids(a)[start:], ids(b))


@given(strings(), st.data())
def test_cuts_and_keys_are_those_of_the_list(string, data):
    start, stop = data.draw(st.tuples(st.integers(0, len(string)), st.integers(0, len(string))))
    assert ids(string.cut(start, stop)) == ids(string)[start:stop]
    assert len(string.cut(start, stop)) == max(0, stop - start)
    if start < len(string):
        assert string.key(start, 1) == ids(string)[start]


@given(strings(), strings(), st.integers(2, 4), st.data())
def test_keys_are_equal_where_tokens_are(a, b, length, data):
    start, other = data.draw(st.tuples(st.integers(0, len(a)), st.integers(0, len(b))))
    equal = ids(a)[start : start + length] == ids(b)[other : other + length]
    assert (a.key(start, length) == b.key(other, length)) == equal


@given(strings(), strings())
def test_strings_are_equal_where_their_tokens_are(a, b):
    assert (a == b) == (ids(a) == ids(b))
    assert a != b or hash(a) == hash(b)
    assert ids(a + b) == ids(a) + ids(b)


@pytest.mark.parametrize("before", [[], [7]])
def test_tokens_are_compared_and_not_bytes(before):
    # 0x01000000 and 0x01000100 share their first byte, little-endian, and no token
    a, b = (string_of([np.array([*before, last], np.int32)]) for last in (0x01000000, 0x01000100))
    assert a.common(0, b) == len(before)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 7), st.integers(0, 1)), min_size=1), st.integers(1, 4))
def test_runs_have_the_tokens_and_the_sums_of_their_arrays(runs, size):
    arrays = [np.array(IdRun(*run)) for run in runs]
    string, weights = string_of([IdRun(*run) for run in runs]), BlockWeights(size)
    assert ids(string) == np.concatenate(arrays).tolist()
    count, start = (len(string) - 1) // size, len(string) - 1 - (len(string) - 1) // size * size
    expected = [
        sum(int(token) * int(each) for token, each in zip(block, weights.each, strict=True)) % 2**64
        for block in np.concatenate(arrays)[start : start + count * size].reshape(count, size)
    ]
    assert string.weighted_sums(start, count, weights).tolist() == expected
    assert string_of(arrays).weighted_sums(start, count, weights).tolist() == expected


def test_runs_that_continue_one_another_are_one():
    joined = string_of([IdRun(3, 2), IdRun(5, 4), IdRun(8, 1)])
    assert [(run.first, run.length) for run in joined.arrays] == [(3, 6), (8, 1)]


def test_empty_arrays_leave_no_trace():
    empty = np.zeros(0, np.int32)
    assert ids(string_of([empty, SHARED[1], empty])) == [0, 1, 0]
    assert len(string_of([empty])) == 0
