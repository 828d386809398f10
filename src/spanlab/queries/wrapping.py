"""What a chat template writes around one independent unit, the same wherever the unit stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spanlab.queries.template import ChatTemplate


class Wrapping(NamedTuple):
    """Texts of a unit of k messages: before the first content, between two (k - 1 of them), after the last."""

    opening: str
    between: tuple[str, ...]
    closing: str


def unit_wrapping(template: ChatTemplate, roles: Sequence[str]) -> Wrapping:
    """Find the wrapping of a unit whose messages have these roles.

    The unit is rendered twice in a row, in a chat of its own: first and not first, with other neighbours. Text that
    only the first place has (a BOS, a default system prompt) stays outside; any other difference between the two places
    means that the unit's token ids would depend on its place, and is a ValueError.
    """
    count = len(roles)
    closing = template.gaps([*roles, *roles], open_turn=False)[-1]
    # A question behind the units, as prompts have one: some templates write the last turns in another way.
    gaps = template.gaps([*roles, *roles, "user"], open_turn=False)
    ends_alike = gaps[count].startswith(closing) and gaps[2 * count].startswith(closing)
    shorter, longer = sorted((gaps[0], gaps[count][len(closing) :]), key=len)
    between, between_again = gaps[1:count], gaps[count + 1 : 2 * count]
    if not (ends_alike and longer.endswith(shorter) and between == between_again):
        raise ValueError(
            f"the chat template of {template.name} writes {'+'.join(roles)} otherwise in another place, so it cannot be"
            " an independent span; expected a template that wraps a message in the same way everywhere"
        )
    return Wrapping(shorter, between, closing)


def closings(template: ChatTemplate, roles: Sequence[str]) -> dict[str, str]:
    """What follows the content of an ordered message, by role: the end of the chat that stops with it.

    Learnt at the first message of each role. A role is left out where the template does not write such a chat; its
    closing text then counts to what follows, which moves a boundary between two ordered spans and nothing else.
    """
    learnt: dict[str, str] = {}
    for role in dict.fromkeys(roles):
        try:
            learnt[role] = template.gaps(roles[: roles.index(role) + 1], open_turn=False)[-1]
        except ValueError:
            continue
    return learnt
