"""Structured queries, in the form of IBM's spnl, rendered to requests whose spans are exact token
ranges."""

from spanlab.queries.query import Group, Message, Query
from spanlab.queries.render import (
    ChatTokenizer,
    Rendered,
    RenderedSpan,
    builtin_tokenizer,
    describe,
    load_tokenizer,
)

__all__ = [
    "ChatTokenizer",
    "Group",
    "Message",
    "Query",
    "Rendered",
    "RenderedSpan",
    "builtin_tokenizer",
    "describe",
    "load_tokenizer",
]
