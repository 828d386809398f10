"""Rendering of a query to a request: text by the chat template, token ids span by span."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spanlab.core.request import Span, Tokens
from spanlab.queries.bos import check_bos, missing_bos
from spanlab.queries.layout import Layout, TextSpan, compute_layout
from spanlab.queries.query import Query, Role
from spanlab.queries.tokenizer import ChatTokenizer, Encoded
from spanlab.queries.units import Chat, flatten


@dataclass(frozen=True, slots=True)
class RenderedSpan:
    """One span of a rendered query.

    `characters`   half-open range in the text; empty for a BOS that the tokenizer adds.
    `tokens`       half-open range in the token ids.
    `roles`        roles of its messages; empty for text of the template alone, such as the open turn.
    `independent`  as in `core.request.Span`.
    `reusable`     as in `core.request.Span`: true for ordered system messages, whose end other requests share.
    """

    characters: tuple[int, int]
    tokens: tuple[int, int]
    roles: tuple[Role, ...]
    independent: bool

    @property
    def reusable(self) -> bool:
        """Whether the end of the span is a boundary that requests share."""
        return not self.independent and "system" in self.roles


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A query as text and as token ids, with all ranges.

    `text`                  complete output of the chat template.
    `contents`              half-open character range of each message's own text, in order.
    `spans`                 spans in order, which cover the text and the token ids without gaps.
    `tokens`                int32 token ids, shape (n,), of spans that are tokenised separately.
    `retokenisation_delta`  number of these tokens that tokenising the complete text would not give at the same
                            characters; 0: splitting at span ends changed nothing; None: not measured.
    """

    text: str
    contents: tuple[tuple[int, int], ...]
    spans: tuple[RenderedSpan, ...]
    tokens: Tokens
    retokenisation_delta: int | None

    @property
    def request_spans(self) -> tuple[Span, ...]:
        """The spans of a request of the core."""
        return tuple(
            Span(self.tokens[slice(*span.tokens)], independent=span.independent, reusable=span.reusable)
            for span in self.spans
        )


def describe(query: Query, tokenizer: ChatTokenizer, *, measure_delta: bool = True) -> Rendered:
    """Apply the chat template once and tokenise span by span.

    The ids of an independent span depend only on its messages and on the template, not on its neighbours or position,
    so that its keys and values are reusable anywhere. The prompt begins with a BOS if template or tokenizer add one; a
    BOS inside the prompt is allowed only if the template opens every message with it. A message that spells a special
    token cannot open or close a turn: its text is tokenised separately, with the special token as plain characters.
    `measure_delta` doubles the cost, because it tokenises the text a second time. Raises ValueError if the tokenizer
    has no template or if template and query are incompatible (see `layout.compute_layout`, `units.flatten`).
    """
    chat = flatten(query)
    layout = compute_layout(chat, tokenizer.template)
    encoded = [_encode(span, layout, tokenizer) for span in layout.spans]
    delta = _retokenisation_delta(layout.text, encoded, tokenizer) if measure_delta else None
    first = next((int(span.tokens[0]) for span in encoded if len(span.tokens)), None)
    spans, ids = _token_ranges(chat, layout, encoded, missing_bos(first, tokenizer))
    if not spans:
        raise ValueError(f"query has no token in the chat template of {tokenizer.name}; expected some text")
    tokens = np.concatenate(ids)
    check_bos(tokens, tokenizer)
    return Rendered(layout.text, layout.contents, tuple(spans), tokens, delta)


def _encode(span: TextSpan, layout: Layout, tokenizer: ChatTokenizer) -> Encoded:
    """Token ids of a span, with their character ranges in the complete text."""
    tokens, characters = [np.empty(0, np.int32)], []
    for start, stop, literal in _split_contents(span, layout, tokenizer.special_texts):
        encoded = tokenizer.encode_with_offsets(layout.text[start:stop], literal=literal)
        tokens.append(encoded.tokens)
        characters += [(start + first, start + last) for first, last in encoded.characters]
    return Encoded(np.concatenate(tokens), characters)


def _split_contents(span: TextSpan, layout: Layout, special_texts: Sequence[str]) -> Iterator[tuple[int, int, bool]]:
    """Ranges of a span to tokenise separately: the complete span, or split at contents that spell special tokens."""
    position = span.start
    for start, stop in layout.contents[slice(*span.messages)]:
        content = layout.text[start:stop]
        if any(special in content for special in special_texts):
            yield position, start, False
            yield start, stop, True
            position = stop
    yield position, span.stop, False


def _retokenisation_delta(text: str, encoded: Sequence[Encoded], tokenizer: ChatTokenizer) -> int:
    complete = tokenizer.encode_with_offsets(text)
    ours = Counter(pair for span in encoded for pair in zip(span.tokens.tolist(), span.characters, strict=True))
    return (ours - Counter(zip(complete.tokens.tolist(), complete.characters, strict=True))).total()


def _token_ranges(
    chat: Chat, layout: Layout, encoded_spans: Sequence[Encoded], bos: Tokens
) -> tuple[list[RenderedSpan], list[Tokens]]:
    """Spans with token ranges; a BOS is added to an ordered first span, or is a span before an independent one."""
    spans: list[RenderedSpan] = []
    ids: list[Tokens] = []
    position = 0

    def append(characters: tuple[int, int], tokens: Tokens, roles: tuple[Role, ...], independent: bool) -> None:
        nonlocal position
        spans.append(RenderedSpan(characters, (position, position + len(tokens)), roles, independent))
        ids.append(tokens)
        position += len(tokens)

    for span, encoded in zip(layout.spans, encoded_spans, strict=True):
        tokens = encoded.tokens
        if not len(tokens):
            _check_may_be_empty(span, chat)
            continue
        if not spans and len(bos):
            if span.independent:
                append((0, 0), bos, (), False)
            else:
                tokens = np.concatenate([bos, tokens])
        roles = tuple(message.role for message in chat.messages[slice(*span.messages)])
        append((span.start, span.stop), tokens, roles, span.independent)
    return spans, ids


def _check_may_be_empty(span: TextSpan, chat: Chat) -> None:
    """Raise ValueError for an independent span without tokens; ordered text without tokens is allowed."""
    if span.independent:
        number = span.messages[0]
        raise ValueError(
            f"message {number + 1}, {chat.messages[number].role}, is an independent span without any token;"
            " expected some text"
        )
