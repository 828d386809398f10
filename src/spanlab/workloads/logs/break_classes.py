"""Why a prompt parts from an earlier one: the class of a break, by small rules about the text on
both sides.

A rule looks at a window around the first difference, or at hashes of whole sections behind it, so
that its cost grows with the text that differs. A stamp, an id or a name is the cause only where the
texts go on alike behind it: then the prompts would be equal without it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

from spanlab.workloads.logs.bodies import Opaque, as_json
from spanlab.workloads.logs.rendering import Section

#: What each class is called in a sentence.
CLASSES = {
    "time_stamp": "a time stamp or date",
    "request_id": "an id or a counter of requests or sessions",
    "user_name": "the name of a user",
    "reordered_tools": "the same tools in another order",
    "changed_tools": "other tools",
    "reordered_keys": "the same JSON with its keys in another order",
    "shuffled_documents": "the same documents in another order",
    "changed_documents": "other documents",
    "dropped_reasoning": "reasoning that was dropped",
    "compaction": "a summary in place of the history",
    "truncation": "a history that was cut",
    "edited_history": "a history that was edited, or goes on in two ways",
    "changed_system_prompt": "another system prompt",
    "changed_parameter": "another parameter",
    "white_space": "white space",
    "template_reasoning": "reasoning that the chat template drops",
    "template_date": "a date that the chat template adds",
    "template_marks": "marks of the chat template, such as that of the beginning",
    "template": "the chat template",
    "new_text": "a new message, as of another conversation",
    "other": "another cause",
}
#: Classes of a difference within a line, which is a part of its position.
OF_A_LINE = frozenset(
    {
        "time_stamp",
        "request_id",
        "user_name",
        "changed_system_prompt",
        "changed_parameter",
        "white_space",
        "other",
    }
)
#: Parts of a prompt that an application writes, and no user: a stamp there needs no further sign.
_OF_APPLICATION = frozenset({"system", "tools", "documents", "prompt", "rendered", ""})

_WINDOW = 400  # characters that are read on each side of a difference
RECURRING = 64  # characters behind a volatile word that must be equal: the least that a cache of blocks shares
_LARGEST_JSON = 1 << 16  # characters of JSON that are parsed around a difference
_LARGEST_TOOLS = 1 << 23
_LONGEST_REASONING = 1 << 16  # characters of a rendered prompt in which reasoning is looked for

# ------------------------------------------------------------------------------
# Words that change from request to request.
# ------------------------------------------------------------------------------

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY = r"(?:mon|tues?|wed(?:nes)?|thur?s?|fri|sat(?:ur)?|sun)(?:day)?\b"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:\s?[ap]\.?m\b\.?)?"
_DATES = (
    r"\d{4}-\d{2}-\d{2}",
    r"\d{4}/\d{1,2}/\d{1,2}",
    r"\d{1,2}[/.]\d{1,2}[/.]\d{2,4}",
    r"\d{4}年\d{1,2}月\d{1,2}日",
    rf"{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?",
    rf"\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH}(?:,?\s+\d{{4}})?",
    _DAY,
    r"1\d{9}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?",
    _CLOCK,
)
_ZONE = r"(?:\s?(?:utc|gmt|z\b|[a-z]{3,4}t\b))?(?:\s?[+-]\d{2}:?\d{2})?"
_MOMENT = f"(?:{'|'.join(_DATES)})"
STAMP = re.compile(
    rf"(?<![\w.-]){_MOMENT}(?:[T ,]{{1,3}}(?:at\s+)?{_MOMENT})*{_ZONE}(?![\w-])", re.IGNORECASE
)
CLOCK = re.compile(rf"[T ,]{{0,3}}(?:at\s+)?(?<!\d){_CLOCK}{_ZONE}", re.IGNORECASE)
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_HEX = r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}"
_MIXED = r"(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{12,}"
#: Ids by their form alone: uuid, hexadecimal, or letters and digits mixed.
ID = re.compile(rf"(?<![\w-])(?:{_UUID}|{_HEX}|{_MIXED})(?![\w-])")
_NUMBER = re.compile(r"(?<![\w.])#?[A-Za-z]*[-_]?\d[\w-]*")
_ID_CUE = re.compile(
    r"(?i)(?:\b|_)(?:id|uuid|guid|request|req|session|sess|trace|span|run|call|turn|attempt|step|seq|sequence|count|"
    r"counter|iteration|message|msg|job|ticket|order|conversation|chat|build|nonce|seed|no|nr|number|time)s?\b"
    r"\W{0,4}(?:id|no|nr|number)?\W{0,4}$|#$"
)
_STAMP_CUE = re.compile(
    r"(?i)\b(?:time|date|today|now|current|currently|timestamp|clock|updated|generated|as of)\b"
)
_NAME = re.compile(r"[^\W\d_a-z][\w.'-]*(?: [^\W\d_a-z][\w.'-]*){0,3}|[^\W\d_][\w.'@+-]*")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_NAME_CUE = re.compile(
    r"(?i)(?:\b(?:user|username|name|customer|member|account|owner|author|assignee|hello|hi|dear|login)\b|"
    r"\b(?:signed|logged) in as|\bassisting|\btalking (?:to|with)|/home/|/users/|\\users\\)"
    r"(?:\s+(?:is|name))?[\s:=\"'*_`(<]{0,6}$"
)
_PARAMETER_CUE = re.compile(
    r"(?i)\b(?:reasoning|effort|thinking|verbosity|temperature|mode|language|locale|model|version|format|level)\b"
    r"(?:\s+is)?[\s:=\"'*_`(]{1,6}$"
)
_VALUE = re.compile(r"[\w.+-]+")
_THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<reasoning>": "</reasoning>",
    "◁think▷": "◁/think▷",
    "<|channel|>analysis<|message|>": "<|end|>",
}
_REASONING_FIELD = re.compile(r',?"(?:reasoning_content|reasoning|thinking)":"(?:[^"\\]|\\.)*"')
_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>(?:(?:system|user|assistant|tool)\b)?|</?s>|<bos>|<eos>|\[/?INST\]|"
    r"</?(?:start|end)_of_turn>|<｜[^｜<>]{1,40}｜>|</?think>"
)
_SUMMARY_CUE = re.compile(r"(?i)\bsummar(?:y|ies|ised|ized)\b|\bcondensed\b")
_COMPACTED_CUE = re.compile(
    r"(?i)\bcompact(?:ed|ion)\b|continued from a previous|conversation (?:so far|up to)"
)
_CUT_CUE = re.compile(
    r"(?i)truncat|\bcleared\b|\bomitted\b|\bremoved\b|\belided\b|\btrimmed\b|\[\.\.\.|\.\.\.\]|…"
)


def without_volatile(text: str) -> str:
    """Return a text in which a mark stands for each stamp and id."""
    return ID.sub("\0", STAMP.sub("\0", text))


def without_thoughts(text: str) -> str:
    """Return a text without the reasoning that its marks enclose, and without the white space
    behind it."""
    for opening, closing in _THOUGHTS.items():
        texts, start = [], 0
        while (begin := text.find(opening, start)) >= 0 and (end := text.find(closing, begin)) >= 0:
            texts.append(text[start:begin])
            rest = text[end + len(closing) : end + len(closing) + _WINDOW]
            start = end + len(closing) + len(rest) - len(rest.lstrip())
        text = "".join([*texts, text[start:]])
    return text


# ------------------------------------------------------------------------------
# A difference between two prompts, and its class.
# ------------------------------------------------------------------------------


class Divergence(NamedTuple):
    """Where two lists of sections part: the number of equal sections, and of equal characters in
    the next one."""

    section: int
    character: int


def divergence_of(earlier: Sequence[Section], later: Sequence[Section]) -> Divergence | None:
    """Return where two prompts part; None if one of them is the beginning of the other."""
    for number, (before, after) in enumerate(zip(earlier, later, strict=False)):
        sides = shown(before), shown(after)
        if sides[0] != sides[1]:
            common = common_length(*sides)
            ends = (common == len(sides[0]) and number + 1 == len(earlier)) or (
                common == len(sides[1]) and number + 1 == len(later)
            )
            return None if ends else Divergence(number, common)
    return None


def shown(section: Section) -> str:
    """Return a section as text; a part that is no text by its kind and its hash."""
    content = section.content
    if isinstance(content, Opaque):
        return f"[{content.kind} {content.name & (1 << 64) - 1:016x}]"
    return content if isinstance(content, str) else " ".join(map(str, content.tolist()))


def common_length(first: str, second: str) -> int:
    """Return the length of the longest common beginning of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Difference:
    """Two prompts from the first section on that differs.

    `earlier`, `later`  their sections; the first ones differ
    `character`         characters that the first ones share
    `goes_on`           whether an answer of the model precedes, and no session tells the prompts
                        apart
    `same_session`      whether both prompts are of one session
    `parameter`         parameter in which the requests differ and on which caches depend; empty if
                        none is known
    `by_template`       whether the messages go on, and only what the template makes of them differs
    """

    earlier: Sequence[Section]
    later: Sequence[Section]
    character: int
    goes_on: bool = False
    same_session: bool = False
    parameter: str = ""
    by_template: bool = False

    @property
    def role(self) -> str:
        """The role of the section that differs, in the later prompt."""
        return self.later[0].role

    @property
    def roles(self) -> set[str]:
        """The roles of the sections that differ."""
        return {self.earlier[0].role, self.role}

    @property
    def is_one_task(self) -> bool:
        """Whether both prompts are of one session or one conversation."""
        return self.goes_on or self.same_session

    @cached_property
    def texts(self) -> tuple[str, str]:
        """The sections that differ, as texts."""
        return shown(self.earlier[0]), shown(self.later[0])

    @cached_property
    def start(self) -> int:
        """Beginning of the window in which rules look: that of the line, if it is near."""
        first = self.character
        return max(self.texts[0].rfind("\n", 0, first) + 1, first - _WINDOW)

    @cached_property
    def windows(self) -> tuple[str, str]:
        """Both texts from the beginning of the window on."""
        stop = self.character + _WINDOW
        return self.texts[0][self.start : stop], self.texts[1][self.start : stop]

    @cached_property
    def names(self) -> tuple[list[int], list[int]]:
        """Hashes of both lists of sections."""
        first, second = (
            [hash(shown(section)) for section in side] for side in (self.earlier, self.later)
        )
        return first, second

    def matches(
        self, pattern: re.Pattern[str], cue: re.Pattern[str] | None = None
    ) -> tuple[str, str] | None:
        """Return the words of both sides that match a pattern and hold the difference, with the
        texts behind them.

        `cue`  matches the text in front of such a word. None if a side has no such word, or if they
               do not go on alike
        """
        sides = []
        for window, text in zip(self.windows, self.texts, strict=True):
            inside = self.character - self.start
            fitting = (
                match
                for match in pattern.finditer(window)
                if match.start() <= inside <= match.end()
            )
            for match in fitting:
                if match.group() and (cue is None or cue.search(window[: match.start()])):
                    sides.append((match.group(), text[self.start + match.end() :][:_WINDOW]))
                    break
        if (
            len(sides) < 2
            or sides[0][0] == sides[1][0]
            or not self._recurs(sides[0][1], sides[1][1])
        ):
            return None
        return sides[0][0], sides[1][0]

    def _recurs(self, first: str, second: str) -> bool:
        """Return whether the texts behind a word go on alike: at once, or from the next line on."""
        sides = (without_volatile(first), without_volatile(second))
        at_once = sides[0][:RECURRING] == sides[1][:RECURRING]
        if self.role in _OF_APPLICATION:
            return at_once or self._same_lines(sides)
        is_long = min(map(len, sides)) >= RECURRING
        followed = (
            len(self.names[0]) > 1
            and len(self.names[1]) > 1
            and self.names[0][1] == self.names[1][1]
        )
        return (at_once and (is_long or followed)) or self._same_lines(sides)

    @staticmethod
    def _same_lines(sides: tuple[str, str]) -> bool:
        """Return whether the next lines begin alike, or share a whole line: other volatile lines
        may stand between."""
        first, second = (side.partition("\n")[2] for side in sides)
        lines = {line for line in first.split("\n") if 2 * len(line) >= RECURRING}
        alike = len(first) >= RECURRING and first[:RECURRING] == second[:RECURRING]
        return alike or not lines.isdisjoint(second.split("\n"))


Rule = Callable[[Difference], bool]


def _is_white_space(difference: Difference) -> bool:
    first, second = (text[difference.character :][:_WINDOW] for text in difference.texts)
    if not (first[:1].isspace() or second[:1].isspace()):
        return False
    sides = ["".join(side.split()) for side in (first, second)]
    length = min(RECURRING, *map(len, sides))
    ends = max(map(len, (first, second))) < _WINDOW and sides[0] == sides[1]
    return ends or (length == RECURRING and sides[0][:length] == sides[1][:length])


def _is_stamp(difference: Difference) -> bool:
    words = difference.matches(STAMP)
    if words is None or difference.role in _OF_APPLICATION:
        return words is not None
    head = difference.windows[0][: difference.character - difference.start]
    return all(CLOCK.search(word) for word in words) or bool(_STAMP_CUE.search(head))


def _is_reasoning_of_template(difference: Difference) -> bool:
    """Return whether what a template renders is equal without its reasoning."""
    if not difference.by_template:
        return False
    start = max(0, difference.character - 40)
    sides = [text[start:][:_LONGEST_REASONING].rstrip() for text in difference.texts]
    plain = [_without_reasoning(side) for side in sides]
    length = min(*map(len, plain), RECURRING + 40)
    is_longer = length > difference.character - start + 8
    return plain != sides and is_longer and plain[0][:length] == plain[1][:length]


def _is_marks(difference: Difference) -> bool:
    """Return whether texts differ only in the marks around messages."""
    start = max(0, difference.character - 40)
    sides = [text[start:][:_WINDOW] for text in difference.texts]
    plain = ["".join(_SPECIAL.sub("", side).split())[: 2 * RECURRING] for side in sides]
    has_marks = any(
        match.end() > difference.character - start
        for side in sides
        for match in _SPECIAL.finditer(side)
    )
    return has_marks and len(plain[0]) >= RECURRING and plain[0] == plain[1]


def _is_reordered_json(difference: Difference) -> bool:
    """Return whether the values of JSON around the difference are equal, and their texts are
    not."""
    text = difference.texts[0]
    head = max(0, difference.character - _WINDOW)
    brackets = re.finditer(r"[\[{]", text[head : difference.character])
    starts = [head + match.start() for match in brackets][:3]
    first = re.search(r"^[\[{]", text[: difference.character], re.MULTILINE)
    # the JSON may begin at each of these, the outermost first
    for start in starts if first is None else [first.start(), *starts]:
        values = [_decoded(text, start) for text in difference.texts]
        if all(end > difference.character for _, end in values):
            return bool(_unpacked(values[0][0]) == _unpacked(values[1][0]))
    return False


def _unpacked(value: Any) -> Any:
    """Return a value in which texts that are JSON, such as arguments of a call, are values."""
    if isinstance(value, dict):
        return {key: _unpacked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unpacked(inner) for inner in value]
    if isinstance(value, str) and value[:1] in ("{", "["):
        inner, end = _decoded(value, 0)
        return inner if end == len(value) else value
    return value


def _decoded(text: str, start: int, largest: int = _LARGEST_JSON) -> tuple[Any, int]:
    """Return the JSON that begins at a character, and its end; the end is 0 where there is none."""
    if len(text) - start > largest:
        return None, 0
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0


@lru_cache(maxsize=16)
def _tools(text: str) -> tuple[Mapping[str, Any], ...]:
    tools, _ = _decoded(text, 0, _LARGEST_TOOLS)
    return (
        tuple(tool for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else ()
    )


@lru_cache(maxsize=16)
def _sorted_texts(text: str) -> tuple[str, ...]:
    return tuple(json.dumps(tool, sort_keys=True) for tool in _tools(text))


def _has_same_tools(difference: Difference, *, in_order: bool) -> bool:
    """Return whether both sides have the same tools, one after another or in another order."""
    if difference.roles != {"tools"}:
        return False
    first, second = (_sorted_texts(text) for text in difference.texts)
    return first == second if in_order else Counter(first) == Counter(second)


def _without_reasoning(text: str) -> str:
    plain = _REASONING_FIELD.sub("", without_thoughts(text))
    return plain.replace("{,", "{").removesuffix("{}").rstrip()


def _has_less_reasoning(difference: Difference) -> bool:
    """Return whether the later prompt is the earlier one without its reasoning."""
    earlier, later = difference.earlier, difference.later
    first = earlier[0].content
    if isinstance(first, Opaque) and "reasoning" in first.kind:
        return len(earlier) > 1 and shown(earlier[1]) == shown(later[0])
    if difference.role not in ("assistant", "prompt", "rendered", "user", "tool"):
        return False
    text = difference.texts[0]
    plain = _without_reasoning(text)
    if plain == text.rstrip():
        return False
    if plain in ("", "assistant"):  # a message of reasoning alone
        return len(earlier) > 1 and shown(earlier[1]) == shown(later[0])
    other = _without_reasoning(difference.texts[1])
    return len(difference.texts[1]) < len(text) and (plain == other or plain.startswith(other))


def _documents_are_shuffled(difference: Difference) -> bool:
    if difference.role == "documents":
        first, second = (
            Counter(
                name
                for name, section in zip(names, side, strict=True)
                if section.role == "documents"
            )
            for names, side in zip(
                difference.names, (difference.earlier, difference.later), strict=True
            )
        )
        return first == second
    parts = []
    for text in difference.texts:
        paragraphs = text.removeprefix(f"{difference.role}\n").split("\n\n")
        parts.append([_LABEL.sub("", paragraph).strip() for paragraph in paragraphs])
    first_parts, second_parts = parts
    if len(first_parts) < 2 or first_parts == second_parts:
        return False
    # at least two long paragraphs stand in another order, with little else that differs
    known = {text for text in first_parts if len(text) >= RECURRING}
    again = [text for text in second_parts if text in known]
    long = [text for text in second_parts if len(text) >= RECURRING]
    if len(again) < 2 or 2 * len(again) < len(long):
        return False
    return [text for text in first_parts if text in set(again)] != again


_LABEL = re.compile(
    r"^\s*(?:#+\s*)?(?:\[\d+\]|\(?\d+[.)]|(?:document|passage|source|chunk|context)\s*#?\[?\d+\]?)\W*",
    re.IGNORECASE,
)


def _is_compaction(difference: Difference) -> bool:
    """Return whether a shorter prompt has a text that calls itself a summary in place of
    messages."""
    if difference.role == "system":
        return False
    sizes = [
        sum(len(shown(section)) for section in side)
        for side in (difference.earlier, difference.later)
    ]
    if sizes[1] >= sizes[0] and len(difference.later) >= len(difference.earlier):
        return False
    heads = [shown(section)[:2000] for section in difference.later[:2]]
    cues = (_COMPACTED_CUE, _SUMMARY_CUE) if difference.is_one_task else (_COMPACTED_CUE,)
    return any(cue.search(head) for cue in cues for head in heads)


def _is_truncation(difference: Difference) -> bool:
    """Return whether the later prompt lacks messages in the middle and goes on behind them, or has
    a cut message."""
    first, second = difference.names
    if difference.role not in _OF_APPLICATION and second[0] in first[1:]:
        gone = first.index(second[0])
        rest = min(len(first) - gone, len(second))
        return first[gone : gone + rest] == second[:rest] and (rest > 1 or difference.is_one_task)
    text, cut = difference.texts
    rest_of_cut = cut[difference.character :]
    if (
        difference.role in ("system", "tools")
        or len(cut) >= len(text)
        or not difference.is_one_task
    ):
        return False
    return not rest_of_cut.strip() or (
        len(rest_of_cut) < _WINDOW and bool(_CUT_CUE.search(rest_of_cut))
    )


def _is_edit(difference: Difference) -> bool:
    """Return whether an earlier message differs, and the conversation or later messages are the
    same."""
    if difference.role in ("system", "tools", "documents", "prompt", "rendered"):
        return False
    first, second = difference.names
    again = (
        shown(section)
        for name, section in zip(second, difference.later, strict=True)
        if name in set(first)
    )
    return difference.goes_on or sum(map(len, again)) >= RECURRING


class BreakRule(NamedTuple):
    """A class of breaks, a rule that holds for it, and what the rule has seen."""

    kind: str
    holds: Rule
    reason: str


_GOES_ON = "the messages go on, and what is rendered parts"
_AT = "at the difference, and the texts go on alike behind it"
#: The first rule that holds gives the class: rules about single words first, then those about whole
#: sections.
RULES = (
    BreakRule(
        "template_reasoning",
        _is_reasoning_of_template,
        f"{_GOES_ON}: it is equal without its reasoning",
    ),
    BreakRule(
        "template_date",
        lambda difference: difference.by_template and difference.matches(STAMP) is not None,
        f"{_GOES_ON}, at a date or time",
    ),
    BreakRule(
        "template_marks",
        lambda difference: difference.by_template and _is_marks(difference),
        f"{_GOES_ON}: it is equal without the marks around messages",
    ),
    BreakRule("template", lambda difference: difference.by_template, _GOES_ON),
    BreakRule(
        "changed_parameter",
        lambda difference: bool(difference.parameter),
        "the requests differ in a parameter",
    ),
    BreakRule(
        "changed_tools",
        lambda difference: difference.roles == {"system", "tools"},
        "one side has no tools",
    ),
    BreakRule(
        "changed_system_prompt",
        lambda difference: len(difference.roles) == 2 and "system" in difference.roles,
        "one side has no system prompt, or a shorter one",
    ),
    BreakRule(
        "reordered_keys",
        partial(_has_same_tools, in_order=True),
        "the tools are equal once their keys are sorted",
    ),
    BreakRule(
        "reordered_tools",
        partial(_has_same_tools, in_order=False),
        "both sides have the same tools",
    ),
    BreakRule("white_space", _is_white_space, "the texts are equal without white space"),
    BreakRule("time_stamp", _is_stamp, f"both sides have a date or time {_AT}"),
    BreakRule(
        "request_id",
        lambda difference: (
            difference.matches(ID) is not None or difference.matches(_NUMBER, _ID_CUE) is not None
        ),
        f"both sides have an id, or a number with a word such as request, {_AT}",
    ),
    BreakRule(
        "user_name",
        lambda difference: (
            difference.matches(_EMAIL) is not None
            or difference.matches(_NAME, _NAME_CUE) is not None
        ),
        f"both sides have an address, or a name behind a word such as user, {_AT}",
    ),
    BreakRule(
        "changed_parameter",
        lambda difference: (
            bool(difference.parameter) or difference.matches(_VALUE, _PARAMETER_CUE) is not None
        ),
        f"both sides have a value behind a word such as effort {_AT}",
    ),
    BreakRule(
        "request_id",
        lambda difference: (
            difference.role in _OF_APPLICATION and difference.matches(_NUMBER) is not None
        ),
        f"both sides have a number {_AT}",
    ),
    BreakRule(
        "changed_tools",
        lambda difference: "tools" in difference.roles,
        "a tool was added, removed or changed",
    ),
    BreakRule(
        "shuffled_documents",
        _documents_are_shuffled,
        "the same documents or paragraphs stand in another order",
    ),
    BreakRule(
        "changed_documents",
        lambda difference: difference.role == "documents",
        "the documents differ",
    ),
    BreakRule("template", _is_marks, "the texts are equal without the marks around messages"),
    BreakRule("reordered_keys", _is_reordered_json, "the JSON of both sides has equal values"),
    BreakRule(
        "dropped_reasoning",
        _has_less_reasoning,
        "the later text is the earlier one without its reasoning",
    ),
    BreakRule(
        "compaction", _is_compaction, "a shorter prompt has a text that calls itself a summary"
    ),
    BreakRule(
        "truncation",
        _is_truncation,
        "messages or the end of a message are missing, and the rest is equal",
    ),
    BreakRule(
        "edited_history", _is_edit, "the conversation is the same, and one of its messages differs"
    ),
    BreakRule(
        "changed_system_prompt",
        lambda difference: "system" in difference.roles,
        "the system prompts differ in more than a word",
    ),
    BreakRule(
        "new_text",
        lambda difference: difference.role in ("user", "assistant", "tool", "prompt", "rendered"),
        "nothing behind the difference is the same",
    ),
)
OTHER = BreakRule("other", lambda difference: True, "no rule holds")


def rule_of(difference: Difference) -> BreakRule:
    """Return the first rule that holds for a difference."""
    return next((rule for rule in RULES if rule.holds(difference)), OTHER)


def tool_at(difference: Difference) -> tuple[int, str] | None:
    """Return number from 1 and name of the tool in which the tools of two prompts differ; None
    elsewhere."""
    if difference.roles != {"tools"}:
        return None
    end = 1
    for number, tool in enumerate(_tools(difference.texts[1]), 1):
        end += len(as_json(tool)) + len(", ")
        if difference.character < end:
            function = tool.get("function")
            return number, str((function if isinstance(function, dict) else tool).get("name"))
    return None
