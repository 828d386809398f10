"""What a cache of unlimited memory reuses: equal prompt beginnings, or equal spans anywhere."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from spanlab.core.request import Request
from spanlab.core.sections import Section, stretches, whole
from spanlab.offline.forest import StorageRules


def prefix_rules(last_token: bool = False, outputs: bool = False) -> StorageRules:
    """Reuse of whatever an earlier prompt with the same salt began with, token by token."""
    return StorageRules(whole, salted_past, 1, last_token, outputs)


def any_position_rules(last_token: bool = False, outputs: bool = False) -> StorageRules:
    """Reuse of independent spans wherever they stand, and of ordered text behind an equal past."""
    return StorageRules(_Anywhere(), salted_past, 1, last_token, outputs)


def salted_past(request: Request, section: Section) -> Hashable:
    """Sections with equal salts and pasts share."""
    return request.salt, section.past


@dataclass
class _Anywhere:
    """The sections of `isolated`, with pasts numbered instead of digested, for it is faster."""

    pasts: dict[tuple[int, bool, bytes], int] = field(default_factory=dict)

    def __call__(self, request: Request) -> tuple[Section, ...]:
        sections, past = [], 0
        for start, stop, independent, tokens in stretches(request):
            name = b"" if independent or not start else b"%d" % past
            sections.append(Section(start, stop, independent, tokens, name, start))
            past = self.pasts.setdefault((past, independent, tokens), len(self.pasts) + 1)
        return tuple(sections)
