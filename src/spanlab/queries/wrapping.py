"""Text that a chat template writes around one independent unit, identical at every position."""

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
    """Determine the wrapping of a unit whose messages have these roles.

    The unit is rendered twice in a row in a separate chat, at two positions with different neighbours. Text of the
    first position only (a BOS, a default system prompt) is not part of the wrapping. Any other difference is a
    ValueError, since token ids of the unit would depend on its position.
    """
    count = len(roles)
    closing = template.gaps([*roles, *roles], open_turn=False)[-1]
    # A question follows the units, as in prompts: some templates write the last turns differently.
    gaps = template.gaps([*roles, *roles, "user"], open_turn=False)
    same_closing = gaps[count].startswith(closing) and gaps[2 * count].startswith(closing)
    shorter, longer = sorted((gaps[0], gaps[count][len(closing) :]), key=len)
    between, second_between = gaps[1:count], gaps[count + 1 : 2 * count]
    if not (same_closing and longer.endswith(shorter) and between == second_between):
        raise ValueError(
            f"the chat template of {template.name} writes {'+'.join(roles)} otherwise in another place, so it cannot be"
            " an independent span; expected a template that wraps a message in the same way everywhere"
        )
    return Wrapping(shorter, between, closing)


def closings(template: ChatTemplate, roles: Sequence[str]) -> dict[str, str]:
    """Text after the content of an ordered message, by role: the end of a chat whose last message has that role.

    It is measured at the first message of each role. A role is omitted if the template rejects such a chat; its
    closing text then belongs to the next span, which only moves a boundary between two ordered spans.
    """
    texts: dict[str, str] = {}
    for role in dict.fromkeys(roles):
        try:
            texts[role] = template.gaps(roles[: roles.index(role) + 1], open_turn=False)[-1]
        except ValueError:
            continue
    return texts
