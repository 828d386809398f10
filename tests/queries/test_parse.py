"""Both notations of queries: meaning, round trip of every query, and error messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.queries import Group, Message
from spanlab.queries.query import GROUP_KINDS, MAX_DEPTH, ROLES, has_message

from ..support.notation import parse, to_json, to_sexpr

SEXPR = """
(seq                                  ; a comment with "quotes" and )
  (system "You are a helpful assistant.")
  (plus
    (user "doc \\"a\\"\\n")
    "doc b; no comment")
  (cross (user "que
stion \\u00e9")))
"""
JSON = """
{"seq": [
  {"system": "You are a helpful assistant."},
  {"plus": [{"user": "doc \\"a\\"\\n"}, "doc b; no comment"]},
  {"cross": [{"user": "que\\nstion é"}]}
]}
"""
QUERY = Group(
    "seq",
    (
        Message("system", "You are a helpful assistant."),
        Group("plus", (Message("user", 'doc "a"\n'), Message("user", "doc b; no comment"))),
        Group("cross", (Message("user", "que\nstion é"),)),
    ),
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
messages = st.builds(Message, st.sampled_from(ROLES), texts)
queries = st.recursive(
    messages,
    lambda nodes: st.builds(Group, st.sampled_from(GROUP_KINDS), st.lists(nodes, max_size=4).map(tuple)),
    max_leaves=12,
)


def test_both_notations_give_the_same_query():
    assert parse(SEXPR) == QUERY
    assert parse(JSON) == QUERY


@given(queries.filter(has_message))
def test_what_is_printed_parses_to_the_same_query(query):
    assert parse(to_sexpr(query)) == query
    assert parse(to_json(query)) == query


def test_a_string_alone_is_a_message_of_the_user():
    assert parse('"why?"') == Message("user", "why?")
    assert parse('("why?")'.strip("()")) == Message("user", "why?")
    assert parse('{"plus": ["a"]}') == Group("plus", (Message("user", "a"),))


def test_an_empty_group_stands_beside_messages():
    assert parse('(seq (plus) "why?")') == Group("seq", (Group("plus", ()), Message("user", "why?")))


KINDS = "one of seq, plus, cross, system, user, assistant"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "query, line 1, column 1: the query ends here; expected a string or ("),
        (" ; only a comment\n", "query, line 2, column 1: the query ends here; expected a string or ("),
        ('(seq\n  (plus "a"', "query, line 2, column 3: this ( is never closed; expected a ) for it"),
        ("(", "query, line 1, column 1: this ( is never closed; expected a ) for it"),
        ('(user "a)', 'query, line 1, column 7: this string never ends; expected a closing "'),
        ('(seq "a"))', "query, line 1, column 10: ) behind the end of the query; expected nothing more"),
        ('"a" "b"', 'query, line 1, column 5: "b" behind the end of the query; expected nothing more'),
        ('(seq\n\t(usr "a"))', f"query, line 2, column 3: usr as the kind of a node; expected {KINDS}"),
        ('("a")', f'query, line 1, column 2: "a" as the kind of a node; expected {KINDS}'),
        ("(seq a)", "query, line 1, column 6: a; expected a string or ("),
        ("(user)", "query, line 1, column 6: ) as the text of user; expected one string"),
        ('(user "a" "b")', 'query, line 1, column 11: "b" behind the text of user; expected )'),
        ('(user (plus "a"))', "query, line 1, column 7: ( as the text of user; expected one string"),
        (
            '(user\n"é\\x")',
            "query, line 2, column 3: this is no escape of a string; expected one of JSON's, such as \\n or \\u00e9",
        ),
        (
            r'(user "\ud800")',
            "query, line 1, column 7: the string holds half of a surrogate pair; expected text that UTF-8 can write",
        ),
        ("(seq (plus))", "query holds no message; expected at least one of system, user, assistant"),
        (
            "(seq" * MAX_DEPTH + '(seq "a"' + ")" * (MAX_DEPTH + 1),
            f"query, line 1, column {4 * MAX_DEPTH + 6}: the query nests deeper than 64; expected fewer levels",
        ),
    ],
)
def test_a_mistake_in_an_sexpression_is_one_sentence_with_its_place(text, sentence):
    with pytest.raises(ValueError, match="query") as caught:
        parse(text)
    assert str(caught.value) == sentence


NODE = f"a string or an object with one key, {KINDS}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('["a"]', f"query is a list; expected {NODE}"),
        ("{}", f"query has 0 keys; expected {NODE}"),
        ('{"user": "a", "system": "b"}', f"query has 2 keys; expected {NODE}"),
        ('{"seq": ["a", {"plus": [{"usr": "b"}]}]}', f"query.seq[1].plus[0] has the kind usr; expected {KINDS}"),
        ('{"seq": ["a", 7]}', f"query.seq[1] is a number; expected {NODE}"),
        ('{"seq": [null]}', f"query.seq[0] is null; expected {NODE}"),
        ('{"seq": {"user": "a"}}', "query.seq is an object; expected a list of nodes"),
        ('{"seq": "a"}', "query.seq is a string; expected a list of nodes"),
        ('{"seq": [{"user": ["a"]}]}', "query.seq[0].user is a list; expected a string"),
        ('{"seq": [{"user": false}]}', "query.seq[0].user is false; expected a string"),
        ('{"seq": ["\\udc00"]}', "query.seq[0] holds half of a surrogate pair; expected text that UTF-8 can write"),
        ('{"plus": []}', "query holds no message; expected at least one of system, user, assistant"),
    ],
)
def test_a_mistake_in_json_is_one_sentence_with_its_path(text, sentence):
    with pytest.raises(ValueError, match="query") as caught:
        parse(text)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 200])
def test_json_that_nests_too_deep_is_refused_and_no_crash(depth):
    with pytest.raises(ValueError, match="nests deeper than 64; expected fewer levels"):
        parse('{"seq": [' * depth + '"a"' + "]}" * depth)


def test_the_deepest_query_allowed_parses_in_both_notations():
    query = Message("user", "a")
    for _ in range(MAX_DEPTH):
        query = Group("seq", (query,))
    assert parse(to_sexpr(query)) == query
    assert parse(to_json(query)) == query
