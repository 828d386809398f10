"""A structured prompt: messages, and the relations between them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template


Role = Literal["system", "user", "assistant"]
GroupKind = Literal["seq", "plus", "cross"]

ROLES: tuple[Role, ...] = ("system", "user", "assistant")
GROUP_KINDS: tuple[GroupKind, ...] = ("seq", "plus", "cross")
KINDS = (*GROUP_KINDS, *ROLES)
EXPECTED_KINDS = f"one of {', '.join(KINDS)}"
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat; the prompt contains `text` unchanged."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """A group of nodes.

    `seq`    ordered children: each depends on the children before it.
    `plus`   children that do not attend to each other, so that their order has no effect:
             documents, passages.
    `cross`  like `seq`, stated explicitly: its content attends to everything before it, siblings
             included.

    An empty group is allowed and adds nothing, for example for a retriever without results.
    """

    kind: GroupKind
    children: tuple[Query, ...]


Query = Message | Group


def has_message(query: Query) -> bool:
    """Whether the query contains at least one message."""
    return isinstance(query, Message) or any(has_message(child) for child in query.children)


def with_a_message(query: Query) -> Query:
    """Return the query; ValueError if it has no message."""
    if not has_message(query):
        raise ValueError("query holds no message; expected at least one of system, user, assistant")
    return query


def text_mistake(text: str) -> str | None:
    """The reason why a text cannot be encoded, as the predicate of an error message, or None."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half of a surrogate pair; expected text that UTF-8 can write"
    return None


# ------------------------------------------------------------------------------
# Flattening of a query tree to a list of messages, and their independent units.
# ------------------------------------------------------------------------------


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

    Messages are ordered by default. A `plus` makes each of its children one independent unit: a
    message, a `seq` with all its messages, each child of a nested `plus`. The content of a `cross`
    attends to everything before it: inside a `plus` its content is ordered again, and a `plus`
    inside it has independent children again. Raises ValueError for a `cross` inside a `seq` that is
    one independent unit, since that unit attends only to itself.
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


# ------------------------------------------------------------------------------
# The chat template of a tokenizer, and the texts that it writes around messages.
# ------------------------------------------------------------------------------

# The date that templates write as today's, so that a prompt does not depend on the day.
TODAY = datetime(2024, 7, 26)
# Placeholders of contents come from the last two planes of Unicode, which are private and contain
# no text.
_FIRST_MARKER, _LAST_MARKER = 0xF0000, 0x10FFFF
_MARKER = re.compile(f"([{chr(_FIRST_MARKER)}-{chr(_LAST_MARKER)}])")


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A Jinja chat template as tokenizers carry it, run in a sandbox.

    `name`       name of the tokenizer in error messages.
    `variables`  further variables of the template, such as bos_token or enable_thinking.
    """

    name: str
    source: str
    variables: Mapping[str, object] = field(default_factory=dict)

    def apply(self, messages: Iterable[tuple[str, str]], *, open_turn: bool) -> str:
        """The text of (role, content) pairs, with an open assistant's turn if `open_turn`.

        ValueError if the template rejects the messages.
        """
        listed = [{"role": role, "content": content} for role, content in messages]
        return self.render(listed, {"add_generation_prompt": open_turn})

    def render(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
    ) -> str:
        """Render messages as a server's template gets them, with further `variables` such as tools
        or documents.

        ValueError if the template rejects the messages.
        """
        compiled = self._compiled
        from jinja2 import TemplateError

        try:
            return compiled.render(**{**self.variables, **variables, "messages": messages})
        except (
            TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
        ) as error:
            raise ValueError(
                f"the chat template of {self.name} does not take these messages ({error}); expected a chat that it can"
                " write, in the roles and the order that it asks for"
            ) from error

    def gaps(self, roles: Sequence[str], *, open_turn: bool) -> tuple[str, ...]:
        """Texts before, between and after the contents of messages in these roles: len(roles) + 1
        strings.

        They are located by a distinct placeholder character for each content. Raises ValueError if
        the template repeats, omits or reorders contents.
        """
        markers = [chr(_FIRST_MARKER + index) for index in range(len(roles))]
        parts = _MARKER.split(self.apply(zip(roles, markers, strict=True), open_turn=open_turn))
        if parts[1::2] != markers:
            raise ValueError(
                f"the chat template of {self.name} repeats, leaves out or reorders messages, so their places in the"
                " prompt cannot be found; expected a template that writes each message once, in order"
            )
        return tuple(parts[::2])

    @cached_property
    def _compiled(self) -> Template:
        try:
            from jinja2 import TemplateSyntaxError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError as error:
            raise ValueError(
                "jinja2 is missing and chat templates need it; expected spanlab's extra engine"
            ) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _as_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": TODAY.strftime}
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template of {self.name} is no Jinja template ({error}); expected one that Jinja can read"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which Jinja's default filter would write into the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# ------------------------------------------------------------------------------
# Text that a chat template writes around one independent unit, identical at every position.
# ------------------------------------------------------------------------------


class Wrapping(NamedTuple):
    """Texts of a unit of k messages: before the first content, between two (k - 1 of them), after
    the last."""

    opening: str
    between: tuple[str, ...]
    closing: str


def unit_wrapping(template: ChatTemplate, roles: Sequence[str]) -> Wrapping:
    """Determine the wrapping of a unit whose messages have these roles.

    The unit is rendered twice in a row in a separate chat, at two positions with different
    neighbours. Text of the first position only (a BOS, a default system prompt) is not part of the
    wrapping. Any other difference is a ValueError, since token ids of the unit would depend on its
    position.
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
    """Text after the content of an ordered message, by role: the end of a chat whose last message
    has that role.

    It is measured at the first message of each role. A role is omitted if the template rejects such
    a chat; its closing text then belongs to the next span, which only moves a boundary between two
    ordered spans.
    """
    texts: dict[str, str] = {}
    for role in dict.fromkeys(roles):
        try:
            texts[role] = template.gaps(roles[: roles.index(role) + 1], open_turn=False)[-1]
        except ValueError:
            continue
    return texts


# ------------------------------------------------------------------------------
# Queries written as JSON: `{"seq": [{"system": "…"}, {"plus": [{"user": "doc a"}]}, {"user":
# "question"}]}`.
# ------------------------------------------------------------------------------

_EXPECTED_NODE = f"a string or an object with one key, {EXPECTED_KINDS}"


def query_of(value: object, path: str = "query", depth: int = 0) -> Query:
    """Return the query that a JSON value describes.

    A node is an object of one key: a group's kind with the list of its children, or a role with its
    text; a bare string is a user's message. ValueError names the path of an error, such as
    `query.seq[1].plus[0]`.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:40]}… nests deeper than {MAX_DEPTH}; expected fewer levels")
    if isinstance(value, str):
        return Message("user", _text(value, path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} is {_type_name(value)}; expected {_EXPECTED_NODE}")
    if len(value) != 1:
        raise ValueError(f"{path} has {len(value)} keys; expected {_EXPECTED_NODE}")
    ((kind, content),) = value.items()
    if kind in ROLES:
        return Message(kind, _text(content, f"{path}.{kind}"))
    if kind not in GROUP_KINDS:
        raise ValueError(f"{path} has the kind {kind}; expected {EXPECTED_KINDS}")
    path = f"{path}.{kind}"
    if not isinstance(content, list):
        raise ValueError(f"{path} is {_type_name(content)}; expected a list of nodes")
    children = (
        query_of(child, f"{path}[{index}]", depth + 1) for index, child in enumerate(content)
    )
    return Group(kind, tuple(children))


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path} is {_type_name(value)}; expected a string")
    if mistake := text_mistake(value):
        raise ValueError(f"{path} {mistake}")
    return value


def _type_name(value: object) -> str:
    """The JSON name of the type of a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")


# ------------------------------------------------------------------------------
# Queries written as s-expressions: `(seq (system "…") (plus (user "doc a") (user "doc b"))
# (user "question"))`.
# ------------------------------------------------------------------------------

#: Tokens of a text; the content of a string or a comment is not split.
SCANNER = re.compile(
    r"""(?P<gap>(?:\s+|;[^\n]*)+)
      | (?P<mark>[()])
      | (?P<string>"[^"\\]*(?:\\.[^"\\]*)*")
      | (?P<quote>")
      | (?P<word>[^\s();"]+)""",
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


def parse_sexpr(text: str) -> Query:
    """Read one s-expression.

    A group is `(seq …)`, `(plus …)` or `(cross …)` around any number of nodes, a message is `(user
    "…")`, `(system "…")` or `(assistant "…")` around one string, and a bare string is a user's
    message. Strings have JSON's escapes and may span several lines; a comment extends from `;` to
    the end of its line. ValueError names line and column of an error, both counted from 1, columns
    in characters.
    """
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [
            _Token(str(match.lastgroup), match.group(), match.start())
            for match in SCANNER.finditer(text)
            if match.lastgroup != "gap"
        ]
        self.next = 0

    def parse(self) -> Query:
        query = self._node(0)
        if self.next < len(self.tokens):
            self._raise_error(
                f"{_shorten(self._peek())} behind the end of the query; expected nothing more"
            )
        return query

    def _node(self, depth: int) -> Query:
        token = self._take()
        if depth > MAX_DEPTH:
            self._raise_error(
                f"the query nests deeper than {MAX_DEPTH}; expected fewer levels", token
            )
        if token.kind == "string":
            return Message("user", self._string(token))
        if token.text != "(":
            self._raise_error(f"{_shorten(token)}; expected a string or (", token)
        name = self._take(token)
        for kind in GROUP_KINDS:
            if name.text == kind:
                children = []
                while self._peek(token).text != ")":
                    children.append(self._node(depth + 1))
                self.next += 1
                return Group(kind, tuple(children))
        for role in ROLES:
            if name.text == role:
                return Message(role, self._only_string(role, token))
        return self._raise_error(
            f"{_shorten(name)} as the kind of a node; expected {EXPECTED_KINDS}", name
        )

    def _only_string(self, role: str, opened: _Token) -> str:
        token = self._take(opened)
        if token.kind != "string":
            self._raise_error(
                f"{_shorten(token)} as the text of {role}; expected one string", token
            )
        closing = self._take(opened)
        if closing.text != ")":
            self._raise_error(f"{_shorten(closing)} behind the text of {role}; expected )", closing)
        return self._string(token)

    def _string(self, token: _Token) -> str:
        try:
            text = json.loads(token.text, strict=False)
        except json.JSONDecodeError as error:
            escape = _Token("escape", token.text, token.start + error.pos)
            self._raise_error(
                "this is no escape of a string; expected one of JSON's, such as \\n or \\u00e9",
                escape,
            )
        assert isinstance(text, str), "a quoted token is a string"
        message = text_mistake(text)
        if message:
            self._raise_error(f"the string {message}", token)
        return text

    def _peek(self, opened: _Token | None = None) -> _Token:
        """The next token; at the end of the text, ValueError that names the open parenthesis."""
        if self.next == len(self.tokens):
            if opened is None:
                self._raise_error(
                    "the query ends here; expected a string or (", _Token("end", "", len(self.text))
                )
            self._raise_error("this ( is never closed; expected a ) for it", opened)
        token = self.tokens[self.next]
        if token.kind == "quote":
            self._raise_error('this string never ends; expected a closing "', token)
        return token

    def _take(self, opened: _Token | None = None) -> _Token:
        token = self._peek(opened)
        self.next += 1
        return token

    def _raise_error(self, sentence: str, token: _Token | None = None) -> NoReturn:
        start = (token or self.tokens[self.next]).start
        line = self.text.count("\n", 0, start) + 1
        column = start - self.text.rfind("\n", 0, start)
        raise ValueError(f"query, line {line}, column {column}: {sentence}")


def _shorten(token: _Token) -> str:
    return token.text if len(token.text) <= 24 else f"{token.text[:20]}…"
