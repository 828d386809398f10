"""Strings of token ids cut, join and compare as the lists of their tokens do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.core.token_string import TokenString, string_of

from .factories import common

SHARED = [np.arange(6, dtype=np.int32) % 2, np.array([0, 1, 0], np.int32), np.zeros(4, np.int32)]


def ids(string: TokenString) -> list[int]:
    return np.frombuffer(string.tobytes(), np.int32).tolist()


@st.composite
def strings(draw) -> TokenString:
    """Joined cuts of arrays that other strings share, or that equal those of others in content alone."""
    string = string_of([])
    for _ in range(draw(st.integers(0, 4))):
        array = draw(st.sampled_from(SHARED))
        start, stop = sorted(draw(st.tuples(st.integers(0, len(array)), st.integers(0, len(array)))))
        piece = string_of([array.copy() if draw(st.booleans()) else array]).cut(start, stop)
        string = string + piece
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
    assert string.key(start, 3) == np.array(ids(string)[start : start + 3], np.int32).tobytes()


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


def test_empty_arrays_leave_no_trace():
    empty = np.zeros(0, np.int32)
    assert ids(string_of([empty, SHARED[1], empty])) == [0, 1, 0]
    assert len(string_of([empty])) == 0
