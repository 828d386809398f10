"""Where prompts part from earlier ones, and why: every break with its class, grouped by position in
the prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from spanlab.analyses.fixes import Facts
from spanlab.core.token_string import sums_before
from spanlab.offline.forest import Ints
from spanlab.report.table import (
    MISSING,
    Cell,
    Field,
    Table,
    count,
    number_format,
    percent,
    tabulate,
    word,
)
from spanlab.workloads.logs.bodies import Prompt
from spanlab.workloads.logs.break_classes import (
    CLASSES,
    OF_A_LINE,
    Difference,
    Divergence,
    divergence_of,
    rule_of,
    shown,
    tool_at,
)
from spanlab.workloads.logs.log import Log, TokensOf
from spanlab.workloads.logs.rendering import BodyOptions, Section, sections_of

MOST_BREAKS = 6  # rows of the table
MOST_SHORT = 2  # and of the one in a terminal
AROUND = 80  # characters of both sides before and after a difference that a report holds without a tokenizer
AROUND_TOKENS = 12  # and tokens with one
# characters of a side in a terminal, and those of them before the difference
_SHORT, _BEFORE = 150, 60
_WINDOW = 400  # characters on each side of a difference that are cut into tokens
# characters that two prompts share if they differ in a parameter and not in everything
_SAME_TEXT = 256
_OF_ALL_TOOLS = ("reordered_tools", "reordered_keys")  # classes that no single tool has
# also where a side has another part there
_ROLE_OF = {"changed_system_prompt": "system", "changed_tools": "tools"}
# sections behind a break by which an earlier prompt of the same conversation is found
_LOOKED_UP = 8

# ------------------------------------------------------------------------------
# The earlier request from which each request parts.
# ------------------------------------------------------------------------------


class _Sections(NamedTuple):
    """Sections of all prompts, end to end.

    `names`   content number of each section: that of its last piece, which no other content has
    `starts`  first section of each request, shape (requests + 1,)
    `first`   the section of each request in which its longest earlier prefix ends
    """

    names: list[int]
    starts: list[int]
    first: list[int]


def _before(numbers: Ints, of: Ints) -> Ints:
    """Return the entry of `of` at the last earlier place with the same number; -1 where there is
    none."""
    order = np.argsort(numbers, kind="stable")
    again = numbers[order][1:] == numbers[order][:-1]
    before = np.full(len(numbers), -1, dtype=np.int64)
    before[order[1:][again]] = of[order[:-1][again]]
    return before


def _earlier(facts: Facts, sections: _Sections, parting: Ints) -> dict[int, int]:
    """Return the earlier request of each of `parting`: of those that share most, one of the same
    conversation.

    That is the one before it in its session, or else the latest that has one of the sections behind
    the break.
    """
    paths, log = facts.paths, facts.log
    again = np.flatnonzero(~paths.first)
    deepest = np.full(paths.requests, -1, dtype=np.int64)
    deepest[paths.owner[again]] = again  # the last one of each request counts
    sharing = _before(paths.nodes, paths.owner)[deepest]
    latest = np.where(deepest < 0, np.arange(paths.requests) - 1, sharing)
    if log.identities is not None:
        alike = _before(log.identities.astype(np.int64), np.arange(paths.requests))
        latest = np.where((deepest < 0) & (alike >= 0), alike, latest)
    of_session = np.full(paths.requests, -1, dtype=np.int64)
    if log.sessions is not None:
        of_session = _before(log.sessions.astype(np.int64), np.arange(paths.requests))
    below = deepest - paths.starts[:-1]

    def shares(request: int, other: int) -> bool:
        if deepest[request] < 0:
            return True
        visit = int(paths.starts[other] + below[request])
        return visit < paths.starts[other + 1] and bool(
            paths.nodes[visit] == paths.nodes[deepest[request]]
        )

    chosen: dict[int, int] = {}
    with_section: dict[int, int] = {}
    wanted = set(parting.tolist())
    names, starts = sections.names, sections.starts
    for request in range(paths.requests):
        if request in wanted:
            chosen[request] = int(latest[request])
            before = int(of_session[request])
            if before >= 0 and shares(request, before):
                chosen[request] = before
            else:
                begin = sections.first[request]
                behind = names[begin : min(begin + _LOOKED_UP, starts[request + 1])]
                others = map(with_section.get, behind)
                same = next(
                    (other for other in others if other is not None and shares(request, other)),
                    None,
                )
                chosen[request] = chosen[request] if same is None else same
        with_section.update(dict.fromkeys(names[starts[request] : starts[request + 1]], request))
    return chosen


# ------------------------------------------------------------------------------
# Classes of all breaks.
# ------------------------------------------------------------------------------


class _Text(NamedTuple):
    """Sections of a prompt; `plain` are those without a chat template, and `arguments` the
    variables of a template."""

    sections: list[Section]
    plain: list[Section]
    arguments: Mapping[str, Any]


class Break(NamedTuple):
    """A break of one request.

    `kind`, `reason`  class, and what its rule has seen
    `role`, `line`    of the message that differs; the line is None where it says nothing
    `tool`            number and name of the tool that differs
    `path`, `character`  section of the body, and the equal characters of it
    `sides`           texts around the difference: what both share before it, and what follows in
                      each
    """

    kind: str
    reason: str
    role: str
    line: int | None
    tool: tuple[int, str] | None
    path: str
    character: int
    sides: tuple[str, str, str] | None


@dataclass
class _Comparison:
    """Compares prompts of a log with earlier ones.

    `breaks`  of each request that was compared; None if its prompt only continues the earlier one
    """

    log: Log
    options: BodyOptions
    prompts: Sequence[Prompt | None]
    breaks: dict[int, Break | None] = field(default_factory=dict)

    def compare(self, request: int, other: int) -> None:
        """Compare a prompt with an earlier one, if the log has both."""
        earlier, later = self.prompts[other], self.prompts[request]
        if earlier is not None and later is not None:
            self.breaks[request] = self._break(
                request, other, self._text(earlier), self._text(later)
            )

    def _text(self, prompt: Prompt) -> _Text:
        sections = sections_of(prompt, self.options)
        if self.options.template is None:
            return _Text(sections, sections, {})
        return _Text(
            sections, sections_of(prompt, BodyOptions(self.options.tools)), prompt.arguments
        )

    def _break(self, request: int, other: int, earlier: _Text, later: _Text) -> Break | None:
        where = divergence_of(earlier.sections, later.sections)
        # parameters on which what two requests share depends
        pairs: list[tuple[Mapping[Any, Any], Mapping[Any, Any]]] = [
            (earlier.arguments, later.arguments)
        ]
        if (identities := self.log.identities) is not None:
            names = self.log.identity_names
            pairs.append((dict(names[identities[other]]), dict(names[identities[request]])))
        differing = (
            str(key)
            for first, second in pairs
            for key in {**first, **second}
            if first.get(key) != second.get(key)
        )
        parameter = ", ".join(sorted(differing))
        if where is not None and where < (0, _SAME_TEXT):
            parameter = ""  # two prompts that have nothing in common
        if where is None and not parameter:
            return None
        sides, before, by_template = (earlier.sections, later.sections), later.sections, False
        if self.options.template is not None and where is not None:
            plain = divergence_of(earlier.plain, later.plain)
            by_template = plain is None
            if plain is not None:
                sides, before, where = (earlier.plain, later.plain), later.plain, plain
        where = where or Divergence(0, 0)
        before = before[: where.section]
        tails = sides[0][where.section :], sides[1][where.section :]
        sessions = self.log.sessions
        same_session = sessions is not None and bool(sessions[request] == sessions[other])
        goes_on = (same_session or sessions is None) and any(
            section.role == "assistant" for section in before
        )
        difference = Difference(
            *tails, where.character, goes_on, same_session, parameter, by_template
        )
        rule = rule_of(difference)
        line = None
        if rule.kind in OF_A_LINE and difference.role != "tools" and not parameter:
            line = _line(before, difference)
        spot = difference.character
        head = difference.texts[0][max(0, spot - _WINDOW) : spot]
        first, second = (text[spot : spot + _WINDOW] for text in difference.texts)
        return Break(
            rule.kind,
            rule.reason + (f": {parameter}" if parameter else ""),
            _ROLE_OF.get(rule.kind, difference.role),
            line,
            None if rule.kind in _OF_ALL_TOOLS else tool_at(difference),
            tails[1][0].path,
            where.character,
            (head, first, second),
        )


def _line(before: Sequence[Section], difference: Difference) -> int | None:
    """Return the line of a message in which two prompts part, from 1; None if it is the line of its
    role."""
    section = difference.later[0]
    text = shown(section)
    of_message = [shown(each) for each in before if each.path == section.path and each.path]
    lines = (
        text.count("\n", 0, difference.character)
        + sum(each.count("\n") + 1 for each in of_message)
        + 1
    )
    return (lines - (of_message or [text])[0].startswith(f"{section.role}\n")) or None


def _excerpts(
    sides: tuple[str, str, str] | None, tokens_of: TokensOf | None
) -> tuple[str | None, str | None]:
    """Return both sides of a difference: 12 tokens before and after it, with the one around it, or
    80 characters without a tokenizer."""
    if sides is None:
        return None, None
    head, *tails = sides
    spot = len(head)
    shown_sides = []
    for tail in tails:
        start, stop = spot - AROUND, spot + AROUND
        if tokens_of is not None:
            tokens = [token for token in tokens_of(head + tail) if token[1] > token[0]]
            before = [begin for begin, end in tokens if end <= spot]
            behind = [end for _, end in tokens if end > spot]
            start = before[-AROUND_TOKENS:][0] if before else spot
            stop = behind[:AROUND_TOKENS][-1] if behind else spot
        shown_sides.append(escaped(f"{head[max(0, start) :]}|{tail[: stop - spot]}"))
    return shown_sides[0], shown_sides[1]


def escaped(text: str) -> str:
    """Return a text with line ends, control and format characters as escapes, so that it stays on
    one line."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


# ------------------------------------------------------------------------------
# Groups of breaks: the same class at the same position of the prompt.
# ------------------------------------------------------------------------------

_ROLES = {
    "system": "the system prompt",
    "user": "messages of the user",
    "assistant": "messages of the model",
    "tool": "results of tools",
    "prompt": "the prompt",
    "rendered": "the rendered prompt",
}


@dataclass(frozen=True)
class Breaks:
    """Breaks of a log.

    `rows`      groups of them, those with most tokens behind the break first
    `requests`  requests that part from an earlier one; `compared` of them have texts on both sides
    `of_request`  the class of each request that parts with texts on both sides
    `notes`     caveats, one sentence each
    """

    rows: list[dict[str, Any]]
    requests: int
    compared: int
    of_request: Mapping[int, str]
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> frozenset[str]:
        """Classes of the breaks."""
        return frozenset(row["class"] for row in self.rows if row["class"])

    @property
    def sentence(self) -> str | None:
        """The largest group of breaks that has a cause which can be mended, in one sentence."""
        causes = [row for row in self.rows if row["class"] not in (None, "new_text")]
        if not causes:
            return None
        row = causes[0]
        return f"{row['requests']:,} of {self.requests:,} prompts that part from earlier ones: {row['says']}"


def breaks_of(facts: Facts, *, redact: bool = False) -> Breaks:
    """Return the groups of breaks, if `redact` without any text; those without a class are grouped
    by their position.

    Fields of a row:

    `class`, `says`  class and position in words; the class is None if it is not known
    `position`       tokens that a prompt shares with an earlier one, and `tokens` that follow in
                     `requests` prompts
    `role`, `line`, `tool`  where the prompts part
    `path`, `character`, `earlier`, `later`  section, equal characters of it and text on both sides,
                                             of the prompt that
                     loses most; None if there is none or it is not shown
    """
    paths, seen = facts.paths, facts.paths.seen_tokens
    behind = paths.prompt_tokens - seen
    parting = np.flatnonzero((behind > 0) & (np.arange(paths.requests) > 0))
    reading = _read(facts, parting)
    if reading is not None and redact:
        for request, known in reading.breaks.items():
            if known is not None:  # no text of the log remains
                role = known.role if known.role in (*_ROLES, "tools", "documents") else "other"
                tool = known.tool and (known.tool[0], "")
                reading.breaks[request] = known._replace(role=role, tool=tool, sides=None)
    groups: dict[Any, list[int]] = defaultdict(list)
    for request in parting.tolist():
        if reading is None or request not in reading.breaks:
            groups[None, int(seen[request])].append(request)
        elif (
            known := reading.breaks[request]
        ) is not None:  # else the prompt only continues the earlier one
            key = (
                known.kind,
                known.role,
                known.line,
                known.tool and (known.tool[1] or known.tool[0]),
            )
            groups[key].append(request)
    rows = [_row(reading, members, seen, behind) for members in groups.values()]
    rows.sort(key=lambda row: -row["tokens"])
    classes = {
        request: known.kind
        for request, known in (reading.breaks if reading else {}).items()
        if known
    }
    unknown = 0 if reading is None else len(parting) - len(reading.breaks)
    notes = (
        (f"{unknown:,} breaks have no class: the log does not have the texts of both prompts",)
        if unknown
        else ()
    )
    return Breaks(rows, sum(row["requests"] for row in rows), len(classes), classes, notes)


def _read(facts: Facts, parting: Ints) -> _Comparison | None:
    """Return the breaks of a log that has texts; None without any."""
    log = facts.log
    if log.source is None or not log.source.has_prompts or not len(parting):
        return None
    reading = _Comparison(log, log.source.options, log.source.prompts)
    last = np.flatnonzero(np.append(log.opens[1:], True))[: len(log.pieces)]
    starts = np.searchsorted(last, log.starts)
    ends = np.concatenate([[0], sums_before(log.lengths, last + 1)])
    reached = sums_before(log.lengths, log.starts[:-1]) + facts.paths.seen_tokens
    first = np.searchsorted(ends, reached, side="right") - 1
    sections = _Sections(
        log.pieces[last].tolist(), starts.tolist(), np.maximum(first, starts[:-1]).tolist()
    )
    for request, other in _earlier(facts, sections, parting).items():
        reading.compare(request, other)
    return reading


def _row(
    reading: _Comparison | None, members: list[int], seen: Ints, behind: Ints
) -> dict[str, Any]:
    request = max(members, key=lambda member: int(behind[member]))
    known = reading.breaks.get(request) if reading else None
    tokens_of = reading.log.source.tokens_of if reading and reading.log.source else None
    row: dict[str, Any] = {
        "class": None,
        "says": f"no text on both sides, at token {seen[request]:,}",
        "reason": None,
        "role": None,
        "line": None,
        "tool": None,
        "requests": len(members),
        "tokens": int(behind[members].sum()),
        "position": int(seen[request]),
        "path": None,
        "character": None,
        "earlier": None,
        "later": None,
    }
    if known is None:
        return row
    earlier, later = _excerpts(known.sides, tokens_of)
    # the position of a break in words, as the end of a sentence
    if known.tool is not None:
        number, name = known.tool
        where = f" from tool {number} on" + (f" ({name})" if name else "")
    elif known.kind == "changed_system_prompt":
        where = "" if known.line is None else f" from line {known.line} on"
    elif known.role in ("tools", "documents"):
        where = ""
    else:
        role = _ROLES.get(
            known.role, f"messages of the role {known.role}" if known.role else known.path
        )
        where = f" ({role})" if known.line is None else f" in line {known.line} of {role}"
    return row | {
        "class": known.kind,
        "says": f"{CLASSES[known.kind]}{where}",
        "reason": known.reason,
        "role": known.role,
        "line": known.line,
        "tool": known.tool and (known.tool[1] or None),
        "path": known.path,
        "character": known.character,
        "earlier": earlier,
        "later": later,
    }


# ------------------------------------------------------------------------------
# Tables of breaks.
# ------------------------------------------------------------------------------


def _group_fields(summary: Mapping[str, Any]) -> tuple[Field, ...]:
    """Return the columns that both tables of the groups of breaks begin with."""
    total = max(summary["breaks_found"]["requests"], 1)
    return (
        Field("says", "why, and where", word, left=True),
        Field("requests", "prompts", count),
        Field("share", "share", percent, lambda row: row["requests"] / total),
        Field("tokens", "tokens\nbehind", count),
    )


def breaks_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of the groups of breaks."""
    rows = summary["breaks"][:MOST_BREAKS]
    fields = (
        *_group_fields(summary),
        Field("position", "position\n(tokens)", number_format(","), keep=3),
        Field("path", "in", _text, left=True, keep=1, empty=(None,)),
        Field("character", "character", number_format(","), keep=2, empty=(None,)),
        Field(
            "earlier", "an earlier prompt", _text, left=True, keep=4, empty=(None,), explains=True
        ),
        Field("later", "a later prompt", _text, left=True, keep=4, empty=(None,), explains=True),
    )
    notes = list(summary["breaks_found"]["notes"])
    if shown_rows := sum(row["earlier"] is not None for row in rows):
        # what of the log's texts the report holds
        notes.insert(
            0,
            f"this report holds texts of {2 * shown_rows} prompts: those that lose most, up to {AROUND_TOKENS} tokens, "
            f"or {AROUND} characters without a tokenizer, before and after |, the break; redact=true leaves them out",
        )
    title = "Why prompts part from earlier ones, with their texts"
    return tabulate("breaks", title, fields, rows, notes)


def top_breaks_table(summary: Mapping[str, Any]) -> Table:
    """Return the largest groups of breaks for a terminal, with the text of the first one that has a
    cause."""
    rows = summary["breaks"][:MOST_SHORT]
    fields = _group_fields(summary)
    first = next(
        (
            row
            for row in rows
            if row["class"] not in (None, "new_text") and row["earlier"] is not None
        ),
        None,
    )
    sides = [] if first is None else short_sides(first["earlier"], first["later"])
    title = "Why prompts part from earlier ones: most tokens behind the break"
    return tabulate("top_breaks", title, fields, rows, sides)


def short_sides(earlier: str, later: str) -> list[str]:
    """Return both sides of a break for a terminal: from at most `_BEFORE` characters before their
    first difference."""
    pairs = enumerate(zip(earlier, later, strict=False))
    cut = max(0, next((spot for spot, (first, second) in pairs if first != second), 0) - _BEFORE)
    return [
        f"{name} {side[cut : cut + _SHORT]}"
        for name, side in (("earlier:", earlier), ("later:  ", later))
    ]


def _text(text: str | None) -> Cell:
    return MISSING if text is None else word(text)
