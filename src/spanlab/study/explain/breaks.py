"""Where prompts part from earlier ones: positions, the tokens behind them, and the text on both sides."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np

from spanlab.study.explain.facts import Facts
from spanlab.workloads.logs.opaque import Opaque
from spanlab.workloads.logs.rendering import Section

MOST = 5  # rows of the table
CANDIDATES = 20  # positions that are looked up; where a prompt only continues an earlier one, it is no break
BEFORE, AFTER = 24, 40  # characters that are shown before a break, and after it


def breaks_of(facts: Facts) -> list[dict[str, Any]]:
    """Return the positions at which most tokens follow a divergence, in decreasing order.

    `position`   tokens that a prompt shares with an earlier one; `tokens` follow it in `requests` prompts
    `path`       section of the body, and `character` in it; null if the log has no text
    `earlier`, `later`  text on both sides for the prompt that loses most; null if there is none or it is not shown
    """
    paths, log = facts.paths, facts.log
    seen = paths.seen_tokens
    behind = paths.prompt_tokens - seen
    later = np.flatnonzero((behind > 0) & (np.arange(paths.requests) > 0))
    if not len(later):
        return []
    positions, index = np.unique(seen[later], return_inverse=True)
    tokens, requests = np.bincount(index, behind[later]).astype(np.int64), np.bincount(index)
    rows, pairs = [], []
    for rank in np.argsort(-tokens, kind="stable")[:CANDIDATES].tolist():
        members = later[index == rank]
        request = int(members[np.argmax(behind[members])])
        pairs.append((request, _earlier(facts, request)))
        counts = {"position": int(positions[rank]), "requests": int(requests[rank]), "tokens": int(tokens[rank])}
        rows.append(counts | {"path": None, "character": None, "earlier": None, "later": None})
    if log.source is None or log.lines is None:
        return rows[:MOST]
    texts = log.source.sections(frozenset(int(log.lines[request]) for pair in pairs for request in pair))
    shown = []
    for row, (request, other) in zip(rows, pairs, strict=True):
        sides = [texts.get(int(log.lines[number])) for number in (other, request)]
        if sides[0] is None or sides[1] is None:
            shown.append(row)
        elif (parted := _parting(sides[0], sides[1])) is not None:
            hidden = {} if log.source.settings.show_text else {"earlier": None, "later": None}
            shown.append(row | parted | hidden)
    return shown[:MOST]


def _earlier(facts: Facts, request: int) -> int:
    """Return the latest earlier request that shares most with a request."""
    paths = facts.paths
    visits = slice(paths.starts[request], paths.starts[request + 1])
    repeated = paths.nodes[visits][~paths.first[visits]]
    if not len(repeated):
        return request - 1
    sharing = paths.owner[paths.nodes == repeated[-1]]
    return int(sharing[sharing < request].max())


def _parting(earlier: list[Section], later: list[Section]) -> dict[str, Any] | None:
    """Return where two prompts part, with the texts; None if the earlier one is the beginning of the later one."""
    for number, section in enumerate(later):
        if number == len(earlier):
            return None
        sides = [_shown(earlier[number]), _shown(section)]
        if sides[0] != sides[1]:
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False)))
            if common == len(sides[0]) and number + 1 == len(earlier):
                return None
            head = sides[0][max(0, common - BEFORE) : common]
            texts = [escaped(f"{head}|{side[common : common + AFTER]}") for side in sides]
            return {"path": section.path, "character": common, "earlier": texts[0], "later": texts[1]}
    return None


def _shown(section: Section) -> str:
    """Return a section as text; a part that is no text by its kind and its hash."""
    content = section.content
    if isinstance(content, Opaque):
        return f"[{content.kind} {content.name & (1 << 64) - 1:016x}]"
    return content if isinstance(content, str) else " ".join(map(str, content.tolist()))


def escaped(text: str) -> str:
    """Return a text with line ends, control and format characters as escapes, so that it stays on one line."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
