"""Flattening of a query tree to a list of messages, and their independent units."""

from __future__ import annotations

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
    walk = _Walk()
    walk.visit(query, in_plus=False)
    return Chat(tuple(walk.messages), tuple(walk.units))


class _Walk:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.units: list[Unit] = []

    def visit(self, node: Query, *, in_plus: bool) -> None:
        if isinstance(node, Message) or (node.kind == "seq" and in_plus):
            self._unit(node, in_plus)
            return
        for child in node.children:
            self.visit(child, in_plus=node.kind == "plus")

    def _unit(self, node: Query, independent: bool) -> None:
        start = len(self.messages)
        self.messages += _messages(node)
        if len(self.messages) > start:
            self.units.append(Unit(start, len(self.messages), independent))


def _messages(node: Query) -> list[Message]:
    if isinstance(node, Message):
        return [node]
    if node.kind == "cross":
        raise ValueError(
            "query has a cross inside a seq inside a plus, where that seq is one independent span and sees nothing"
            " else; expected the cross directly inside the plus or outside it"
        )
    return [message for child in node.children for message in _messages(child)]
