"""A prompt with structure: messages, and how they stand to each other."""

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
    """One message of a chat; `text` stands in the prompt as it is."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes side by side.

    `seq`    one after the other: each child means something only behind those before it.
    `plus`   children that do not look at each other, so that their order does not matter: documents, passages.
    `cross`  like `seq`, and said explicitly: everything inside sees all that stands before it, siblings too.

    An empty group is allowed and adds nothing, as when a retriever found no document.
    """

    kind: GroupKind
    children: tuple[Query, ...]


Query = Message | Group


def holds_a_message(query: Query) -> bool:
    """Whether there is anything at all to put into a prompt."""
    return isinstance(query, Message) or any(holds_a_message(child) for child in query.children)


def with_a_message(query: Query) -> Query:
    """The query; ValueError where it holds no message."""
    if not holds_a_message(query):
        raise ValueError("query holds no message; expected at least one of system, user, assistant")
    return query


def text_mistake(text: str) -> str | None:
    """What keeps a text from being encoded, as the rest of a sentence, or None."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half of a surrogate pair; expected text that UTF-8 can write"
    return None
