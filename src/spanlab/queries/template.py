"""The chat template of a tokenizer, and the texts that it writes around messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template

# The date that templates write as today's, so that a prompt does not depend on the day.
TODAY = datetime(2024, 7, 26)
# Placeholders of contents come from the last two planes of Unicode, which are private and contain no text.
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

    def render(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]) -> str:
        """Render messages as a server's template gets them, with further `variables` such as tools or documents.

        ValueError if the template rejects the messages.
        """
        compiled = self._compiled
        from jinja2 import TemplateError

        try:
            return compiled.render(**{**self.variables, **variables, "messages": messages})
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ValueError(
                f"the chat template of {self.name} does not take these messages ({error}); expected a chat that it can"
                " write, in the roles and the order that it asks for"
            ) from error

    def gaps(self, roles: Sequence[str], *, open_turn: bool) -> tuple[str, ...]:
        """Texts before, between and after the contents of messages in these roles: len(roles) + 1 strings.

        They are located by a distinct placeholder character for each content. Raises ValueError if the template
        repeats, omits or reorders contents.
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
            raise ValueError("jinja2 is missing and chat templates need it; expected spanlab's extra engine") from error
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
