"""Queries written as JSON: `{"seq": [{"system": "…"}, {"plus": [{"user": "doc a"}]}, {"user": "question"}]}`."""

from __future__ import annotations

import json

from spanlab.queries.query import EXPECTED_KINDS, GROUP_KINDS, MAX_DEPTH, ROLES, Group, Message, Query, text_mistake

_EXPECTED_NODE = f"a string or an object with one key, {EXPECTED_KINDS}"


def query_of(value: object, path: str = "query", depth: int = 0) -> Query:
    """Return the query that a JSON value describes.

    A node is an object of one key: a group's kind with the list of its children, or a role with its text; a bare
    string is a user's message. ValueError names the path of an error, such as `query.seq[1].plus[0]`.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:40]}… nests deeper than {MAX_DEPTH}; expected fewer levels")
    if isinstance(value, str):
        return Message("user", _text(value, path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} is {_type_name(value)}; expected {_EXPECTED_NODE}")
    if len(value) != 1:
        raise ValueError(f"{path} has {len(value)} keys; expected {_EXPECTED_NODE}")
    ((kind, content),) = value.items()
    if kind in ROLES:
        return Message(kind, _text(content, f"{path}.{kind}"))
    if kind not in GROUP_KINDS:
        raise ValueError(f"{path} has the kind {kind}; expected {EXPECTED_KINDS}")
    path = f"{path}.{kind}"
    if not isinstance(content, list):
        raise ValueError(f"{path} is {_type_name(content)}; expected a list of nodes")
    children = (query_of(child, f"{path}[{index}]", depth + 1) for index, child in enumerate(content))
    return Group(kind, tuple(children))


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path} is {_type_name(value)}; expected a string")
    if mistake := text_mistake(value):
        raise ValueError(f"{path} {mistake}")
    return value


def _type_name(value: object) -> str:
    """The JSON name of the type of a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
