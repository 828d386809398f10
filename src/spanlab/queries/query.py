"""A structured prompt: messages, and the relations between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]
GroupKind = Literal["seq", "plus", "cross"]

ROLES: tuple[Role, ...] = ("system", "user", "assistant")
GROUP_KINDS: tuple[GroupKind, ...] = ("seq", "plus", "cross")
KINDS = (*GROUP_KINDS, *ROLES)
EXPECTED_KINDS = f"one of {', '.join(KINDS)}"
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; the prompt contains `text` unchanged."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """A group of nodes.

    `seq`    ordered children: each depends on the children before it.
    `plus`   children that do not attend to each other, so that their order has no effect: documents, passages.
    `cross`  like `seq`, stated explicitly: its content attends to everything before it, siblings included.

    An empty group is allowed and adds nothing, for example for a retriever without results.
    """

    kind: GroupKind
    children: tuple[Query, ...]


Query = Message | Group


def has_message(query: Query) -> bool:
    """Whether the query contains at least one message."""
    return isinstance(query, Message) or any(has_message(child) for child in query.children)


def with_a_message(query: Query) -> Query:
    """Return the query; ValueError if it has no message."""
    if not has_message(query):
        raise ValueError("query holds no message; expected at least one of system, user, assistant")
    return query


def text_mistake(text: str) -> str | None:
    """The reason why a text cannot be encoded, as the predicate of an error message, or None."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half of a surrogate pair; expected text that UTF-8 can write"
    return None
