"""Queries written as s-expressions: `(seq (system "…") (plus (user "doc a") (user "doc b")) (user "question"))`."""

from __future__ import annotations

import json
import re
from typing import NamedTuple, NoReturn

from spanlab.queries.query import EXPECTED_KINDS, GROUP_KINDS, MAX_DEPTH, ROLES, Group, Message, Query, text_mistake

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

    A group is `(seq …)`, `(plus …)` or `(cross …)` around any number of nodes, a message is `(user "…")`,
    `(system "…")` or `(assistant "…")` around one string, and a bare string is a user's message. Strings have JSON's
    escapes and may span several lines; a comment extends from `;` to the end of its line. ValueError names line and
    column of an error, both counted from 1, columns in characters.
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
            self._raise_error(f"{_shorten(self._peek())} behind the end of the query; expected nothing more")
        return query

    def _node(self, depth: int) -> Query:
        token = self._take()
        if depth > MAX_DEPTH:
            self._raise_error(f"the query nests deeper than {MAX_DEPTH}; expected fewer levels", token)
        if token.kind == "string":
            return Message("user", self._string(token))
        if token.text != "(":
            self._raise_error(f"{_shorten(token)}; expected a string or (", token)
        return self._form(token, depth)

    def _form(self, opened: _Token, depth: int) -> Query:
        name = self._take(opened)
        for kind in GROUP_KINDS:
            if name.text == kind:
                return Group(kind, self._children(opened, depth + 1))
        for role in ROLES:
            if name.text == role:
                return Message(role, self._only_string(role, opened))
        return self._raise_error(f"{_shorten(name)} as the kind of a node; expected {EXPECTED_KINDS}", name)

    def _children(self, opened: _Token, depth: int) -> tuple[Query, ...]:
        children = []
        while self._peek(opened).text != ")":
            children.append(self._node(depth))
        self.next += 1
        return tuple(children)

    def _only_string(self, role: str, opened: _Token) -> str:
        token = self._take(opened)
        if token.kind != "string":
            self._raise_error(f"{_shorten(token)} as the text of {role}; expected one string", token)
        closing = self._take(opened)
        if closing.text != ")":
            self._raise_error(f"{_shorten(closing)} behind the text of {role}; expected )", closing)
        return self._string(token)

    def _string(self, token: _Token) -> str:
        try:
            text = json.loads(token.text, strict=False)
        except json.JSONDecodeError as error:
            escape = _Token("escape", token.text, token.start + error.pos)
            self._raise_error("this is no escape of a string; expected one of JSON's, such as \\n or \\u00e9", escape)
        assert isinstance(text, str), "a quoted token is a string"
        message = text_mistake(text)
        if message:
            self._raise_error(f"the string {message}", token)
        return text

    def _peek(self, opened: _Token | None = None) -> _Token:
        """The next token; at the end of the text, ValueError that names the open parenthesis."""
        if self.next == len(self.tokens):
            if opened is None:
                self._raise_error("the query ends here; expected a string or (", _Token("end", "", len(self.text)))
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
