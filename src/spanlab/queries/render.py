"""From a query to a request: text by the chat template, token ids span by span."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spanlab.core.request import Request, Span, Tokens
from spanlab.queries.bos import check_bos, missing_bos
from spanlab.queries.layout import Layout, TextSpan, lay_out
from spanlab.queries.query import Query, Role
from spanlab.queries.tokenizer import ChatTokenizer
from spanlab.queries.units import Chat, flatten


@dataclass(frozen=True, slots=True)
class RenderedSpan:
    """One span of a rendered query.

    `characters`   half-open range in the text; empty for a BOS that the tokenizer puts before it.
    `tokens`       half-open range in the token ids.
    `roles`        of the messages inside; empty for text that the template writes by itself, such as the open turn.
    `independent`  as in `core.request.Span`.
    `reusable`     as there: true for ordered system messages, whose end other requests share.
    """

    characters: tuple[int, int]
    tokens: tuple[int, int]
    roles: tuple[Role, ...]
    independent: bool

    @property
    def reusable(self) -> bool:
        """Whether the span's end is a known boundary."""
        return not self.independent and "system" in self.roles


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A query as text and as token ids, with all ranges.

    `text`                  what the chat template wrote, as a whole.
    `contents`              half-open character range of each message's own text, in order.
    `spans`                 cover the text and the token ids without gaps, in order.
    `tokens`                int32 token ids, shape (n,): the spans' ids, each span tokenised on its own.
    `retokenisation_delta`  number of these tokens that tokenising the whole text at once would not give at the same
                            characters; 0 means the cuts at the spans' ends changed nothing; None if not measured.
    """

    text: str
    contents: tuple[tuple[int, int], ...]
    spans: tuple[RenderedSpan, ...]
    tokens: Tokens
    retokenisation_delta: int | None

    def request(
        self,
        request_id: int = 0,
        *,
        group_id: int = 0,
        output_len: int = 1,
        arrived_at: int = 0,
        cache_salt: str = "",
        answer: str | None = None,
    ) -> Request:
        """The same spans as the core knows them; arguments as in `core.request.Request`."""
        spans = tuple(
            Span(self.tokens[slice(*span.tokens)], independent=span.independent, reusable=span.reusable)
            for span in self.spans
        )
        return Request(request_id, group_id, spans, output_len, arrived_at, cache_salt, answer)


def describe(query: Query, tokenizer: ChatTokenizer, *, measure_delta: bool = True) -> Rendered:
    """Apply the chat template once and tokenise span by span.

    An independent span's ids depend on its own messages and on the template alone, never on its neighbours or its
    place, which is what makes its keys and values reusable anywhere. A BOS stands at the very beginning, if template or
    tokenizer ask for one, and elsewhere only where the template opens every message with it. A message that spells a
    special token cannot open or close a turn: its text is then tokenised apart, with the special token read as plain
    characters. `measure_delta` costs as much as all the rest, because it tokenises the text a second time. Raises
    ValueError, one sentence, if the tokenizer has no template or if template and query do not go together (see
    `layout.lay_out`, `units.flatten`).
    """
    chat = flatten(query)
    layout = lay_out(chat, tokenizer.template)
    parts = [_encode(span, layout, tokenizer) for span in layout.spans]
    delta = _retokenisation_delta(layout.text, parts, tokenizer) if measure_delta else None
    first = next((int(part.tokens[0]) for part in parts if len(part.tokens)), None)
    spans, ids = _place(chat, layout, parts, missing_bos(first, tokenizer))
    if not spans:
        raise ValueError(f"query has no token in the chat template of {tokenizer.name}; expected some text")
    tokens = np.concatenate(ids)
    check_bos(tokens, tokenizer)
    return Rendered(layout.text, layout.contents, tuple(spans), tokens, delta)


@dataclass(frozen=True, slots=True)
class _Part:
    """A span's token ids, and for each the characters of the whole text that it stands for."""

    tokens: Tokens
    characters: list[tuple[int, int]]


def _encode(span: TextSpan, layout: Layout, tokenizer: ChatTokenizer) -> _Part:
    tokens, characters = [np.empty(0, np.int32)], []
    for start, stop, literal in _cut(span, layout, tokenizer.special_texts):
        encoded = tokenizer.encode_with_places(layout.text[start:stop], literal=literal)
        tokens.append(encoded.tokens)
        characters += [(start + first, start + last) for first, last in encoded.characters]
    return _Part(np.concatenate(tokens), characters)


def _cut(span: TextSpan, layout: Layout, special_texts: Sequence[str]) -> Iterator[tuple[int, int, bool]]:
    """Ranges of a span to tokenise on their own: all of it, or around contents that spell special tokens."""
    position = span.start
    for start, stop in layout.contents[slice(*span.messages)]:
        content = layout.text[start:stop]
        if any(special in content for special in special_texts):
            yield position, start, False
            yield start, stop, True
            position = stop
    yield position, span.stop, False


def _retokenisation_delta(text: str, parts: Sequence[_Part], tokenizer: ChatTokenizer) -> int:
    whole = tokenizer.encode_with_places(text)
    ours = Counter(pair for part in parts for pair in zip(part.tokens.tolist(), part.characters, strict=True))
    return (ours - Counter(zip(whole.tokens.tolist(), whole.characters, strict=True))).total()


def _place(chat: Chat, layout: Layout, parts: Sequence[_Part], bos: Tokens) -> tuple[list[RenderedSpan], list[Tokens]]:
    """Spans with their token ranges; a BOS goes into an ordered first span or, before an independent one, its own."""
    spans: list[RenderedSpan] = []
    ids: list[Tokens] = []
    position = 0

    def add(characters: tuple[int, int], tokens: Tokens, roles: tuple[Role, ...], independent: bool) -> None:
        nonlocal position
        spans.append(RenderedSpan(characters, (position, position + len(tokens)), roles, independent))
        ids.append(tokens)
        position += len(tokens)

    for span, part in zip(layout.spans, parts, strict=True):
        tokens = part.tokens
        if not len(tokens):
            _check_may_be_empty(span, chat)
            continue
        if not spans and len(bos):
            if span.independent:
                add((0, 0), bos, (), False)
            else:
                tokens = np.concatenate([bos, tokens])
        roles = tuple(message.role for message in chat.messages[slice(*span.messages)])
        add((span.start, span.stop), tokens, roles, span.independent)
    return spans, ids


def _check_may_be_empty(span: TextSpan, chat: Chat) -> None:
    """Text that the tokenizer drops may stand between spans; an independent span must have something to reuse."""
    if span.independent:
        number = span.messages[0]
        raise ValueError(
            f"message {number + 1}, {chat.messages[number].role}, is an independent span without any token;"
            " expected some text"
        )
