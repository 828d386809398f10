"""Structured queries, in the form of IBM's spnl, rendered to requests whose spans are exact token ranges."""

from spanlab.queries.builtin import builtin_tokenizer
from spanlab.queries.query import Group, Message, Query
from spanlab.queries.render import Rendered, RenderedSpan, describe
from spanlab.queries.tokenizer import ChatTokenizer, load_tokenizer

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
