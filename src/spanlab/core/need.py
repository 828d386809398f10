"""What one request may hold, whatever the store contains when it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from spanlab.core.repair import Reused
from spanlab.core.request import Request
from spanlab.core.sections import repeats

if TYPE_CHECKING:
    from spanlab.core.policy import Policy


class Need(NamedTuple):
    """What one request may hold by itself: tokens, its own copies among them, and sequences of pages.

    Every sequence of pages, a section's or a copy's, ends on a page that may be all but empty.
    """

    tokens: int
    copies: int
    sequences: int
    kv_bytes: int
    state_bytes: int


def need_of(policy: Policy, request: Request) -> Need:
    """What a request may hold by itself, if everything that it may copy is copied; its last token is never computed."""
    rules, sections = policy.rules, policy.layout(request)
    spans = [section for section in sections if section.independent]
    if rules.copies:
        copies = sum(section.stop - section.start for section in spans)
    else:
        reused = [Reused(section.start, section.stop, 0) for section in spans if not section.exact]
        copies = 0 if rules.repair.kind == "none" else rules.repair.private(reused, policy.content.tree.page)
    twins = repeats(sections) if rules.keeps else {}
    shared = sum(sections[at].stop - sections[at].start for at in twins)
    tokens = request.num_tokens - shared + request.output_len - 1 + copies
    state = policy.content.state_bytes if rules.needs_states else 0
    sequences = len(sections) - len(twins) + len(spans) * (copies > 0)
    return Need(tokens, copies, sequences, tokens * policy.content.token_bytes, state)
