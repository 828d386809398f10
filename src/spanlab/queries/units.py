"""Flattening of a query tree to a list of messages, and their independent units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spanlab.queries.query import Message, Query


@dataclass(frozen=True, slots=True)
class Unit:
    """Messages `[start, stop)` of the list; an `independent` unit attends only to itself."""

    start: int
    stop: int
    independent: bool


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in the order written, and the units that cover them without gaps."""

    messages: tuple[Message, ...]
    units: tuple[Unit, ...]


def flatten(query: Query) -> Chat:
    """Traverse a query in the order written, and determine its independent units.

    Messages are ordered by default. A `plus` makes each of its children one independent unit: a message, a `seq` with
    all its messages, each child of a nested `plus`. The content of a `cross` attends to everything before it: inside a
    `plus` its content is ordered again, and a `plus` inside it has independent children again. Raises ValueError for a
    `cross` inside a `seq` that is one independent unit, since that unit attends only to itself.
    """
    messages: list[Message] = []
    units: list[Unit] = []
    for content, independent in _units(query, in_plus=False):
        if content:
            units.append(Unit(len(messages), len(messages) + len(content), independent))
            messages += content
    return Chat(tuple(messages), tuple(units))


def _units(node: Query, *, in_plus: bool) -> Iterator[tuple[list[Message], bool]]:
    """Yield the messages of each unit in order, and whether it is independent."""
    if isinstance(node, Message) or (node.kind == "seq" and in_plus):
        yield _messages(node), in_plus
        return
    for child in node.children:
        yield from _units(child, in_plus=node.kind == "plus")


def _messages(node: Query) -> list[Message]:
    if isinstance(node, Message):
        return [node]
    if node.kind == "cross":
        raise ValueError(
            "query has a cross inside a seq inside a plus, where that seq is one independent span and sees nothing"
            " else; expected the cross directly inside the plus or outside it"
        )
    return [message for child in node.children for message in _messages(child)]
