"""Queries written as JSON: `{"seq": [{"system": "…"}, {"plus": [{"user": "doc a"}]}, {"user": "question"}]}`."""

from __future__ import annotations

import json

from spanlab.queries.query import EXPECTED_KINDS, GROUP_KINDS, MAX_DEPTH, ROLES, Group, Message, Query, text_mistake

_EXPECTED_NODE = f"a string or an object with one key, {EXPECTED_KINDS}"
# Objects are parsed as pairs, because a dict would silently keep only the last of two equal keys.
_Pairs = tuple[tuple[str, object], ...]


def parse_json(text: str) -> Query:
    """Read one JSON value.

    A node is an object of one key: a group's kind with the list of its children, or a role with its text; a bare
    string is a user's message. ValueError names the path of an error, such as `query.seq[1].plus[0]`, or line and
    column if the text is not JSON.
    """
    try:
        value = json.loads(text, object_pairs_hook=tuple)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"query, line {error.lineno}, column {error.colno}: this is not JSON ({error.msg});"
            f" expected {_EXPECTED_NODE}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"query nests deeper than {MAX_DEPTH}; expected fewer levels") from error
    return _node(value, "query", 0)


def _node(value: object, path: str, depth: int) -> Query:
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:40]}… nests deeper than {MAX_DEPTH}; expected fewer levels")
    if isinstance(value, str):
        return Message("user", _text(value, path))
    key, content = _only_pair(value, path)
    for kind in GROUP_KINDS:
        if key == kind:
            return Group(kind, _children(content, f"{path}.{kind}", depth + 1))
    for role in ROLES:
        if key == role:
            return Message(role, _text(content, f"{path}.{role}"))
    raise ValueError(f"{path} has the kind {key}; expected {EXPECTED_KINDS}")


def _only_pair(value: object, path: str) -> tuple[str, object]:
    if not isinstance(value, tuple):
        raise ValueError(f"{path} is {_type_name(value)}; expected {_EXPECTED_NODE}")
    pairs: _Pairs = value
    if len(pairs) != 1:
        raise ValueError(f"{path} has {len(pairs)} keys; expected {_EXPECTED_NODE}")
    return pairs[0]


def _children(value: object, path: str, depth: int) -> tuple[Query, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{path} is {_type_name(value)}; expected a list of nodes")
    return tuple(_node(child, f"{path}[{index}]", depth) for index, child in enumerate(value))


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path} is {_type_name(value)}; expected a string")
    error = text_mistake(value)
    if error:
        raise ValueError(f"{path} {error}")
    return value


def _type_name(value: object) -> str:
    """The JSON name of the type of a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = ((tuple, "an object"), (list, "a list"), (str, "a string"))
    return next((name for kind, name in names if isinstance(value, kind)), "a number")
