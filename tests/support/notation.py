"""Queries for tests: from text and back, in both notations."""

import json

from spanlab.queries.query import Message, Query, parse_sexpr, query_of, with_a_message


def parse(text: str) -> Query:
    """Read a query; text that starts with { or [ is JSON, everything else an s-expression.

    Raises ValueError, one sentence with the place of the mistake, and refuses a query without any message.
    """
    return with_a_message(query_of(json.loads(text)) if text.lstrip().startswith(("{", "[")) else parse_sexpr(text))


def to_sexpr(query: Query) -> str:
    """Write a query as an s-expression on one line; `parse` gives the same query back."""
    if isinstance(query, Message):
        return f"({query.role} {json.dumps(query.text, ensure_ascii=False)})"
    return f"({' '.join((query.kind, *map(to_sexpr, query.children)))})"


def to_json(query: Query) -> str:
    """Write a query as JSON on one line; `parse` gives the same query back."""
    return json.dumps(_plain(query), ensure_ascii=False)


def _plain(query: Query) -> dict[str, object]:
    if isinstance(query, Message):
        return {query.role: query.text}
    return {query.kind: [_plain(child) for child in query.children]}
