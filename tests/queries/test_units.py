"""Independent parts of a query, by the rules of plus, seq and cross."""

import pytest

from spanlab.queries.query import flatten

from ..support.notation import parse


def units(text: str) -> list[tuple[str, bool]]:
    """Each unit as the texts of its messages and whether it is independent."""
    chat = flatten(parse(text))
    ends = [0, *(unit.stop for unit in chat.units)]
    assert [unit.start for unit in chat.units] == ends[:-1], "units leave gaps"
    assert ends[-1] == len(chat.messages), "units leave messages out"
    return [("+".join(m.text for m in chat.messages[u.start : u.stop]), u.independent) for u in chat.units]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"a"', [("a", False)]),
        ('(seq "a" "b")', [("a", False), ("b", False)]),
        ('(plus "a" "b")', [("a", True), ("b", True)]),
        ('(seq "s" (plus "a" (assistant "b")) "q")', [("s", False), ("a", True), ("b", True), ("q", False)]),
        ('(plus "a" (plus "b" (plus "c")))', [("a", True), ("b", True), ("c", True)]),
        ('(plus (seq "a" (assistant "b")) "c")', [("a+b", True), ("c", True)]),
        ('(plus (seq "a" (plus "b" "c") (seq "d")))', [("a+b+c+d", True)]),
        ('(plus "a" (cross "b" "c") "d")', [("a", True), ("b", False), ("c", False), ("d", True)]),
        ('(plus (cross "a" (plus "b" (seq "c" "d"))))', [("a", False), ("b", True), ("c+d", True)]),
        ('(cross "a" (seq "b" (plus "c")))', [("a", False), ("b", False), ("c", True)]),
        ('(seq (plus) "a" (plus (seq) "b"))', [("a", False), ("b", True)]),
    ],
)
def test_units_follow_plus_seq_and_cross(text, expected):
    assert units(text) == expected


def test_a_cross_that_could_not_see_all_is_refused():
    with pytest.raises(ValueError, match="cross inside a seq inside a plus, where that seq is one independent span"):
        flatten(parse('(plus (seq "a" (cross "b")))'))
