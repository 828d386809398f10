"""Rendering of a query to a request: text by the chat template, token ids span by span."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import orjson

from spanlab.core.request import Span
from spanlab.core.token_string import Tokens
from spanlab.queries.query import (
    Chat,
    ChatTemplate,
    Message,
    Query,
    Role,
    Unit,
    closings,
    flatten,
    unit_wrapping,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# ------------------------------------------------------------------------------
# Character ranges of messages and spans in the rendered text.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters `[start, stop)` of the prompt, and the messages `[first, last)` whose contents
    they contain."""

    start: int
    stop: int
    messages: tuple[int, int]
    independent: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Text of the prompt, half-open range of each message's content, and spans that cover the text
    without gaps."""

    text: str
    contents: tuple[tuple[int, int], ...]
    spans: tuple[TextSpan, ...]


def compute_layout(chat: Chat, template: ChatTemplate) -> Layout:
    """Apply the template once to all messages, with an open assistant's turn, and locate every
    range in the text.

    The span of an independent unit includes its wrapping, which is the same at every position. The
    span of an ordered message includes the other text around it. Text that belongs to neither (a
    BOS, a default system prompt, the open turn) is a separate ordered span. Raises ValueError if
    the template changes a content or wraps an independent unit differently by position.
    """
    roles = [message.role for message in chat.messages]
    gaps = template.gaps(roles, open_turn=True)
    text = template.apply(
        ((message.role, message.text) for message in chat.messages), open_turn=True
    )
    if text != _fill_gaps(gaps, [message.text for message in chat.messages]):
        raise ValueError(_change_error(chat.messages, template))
    check_open_turn(template, roles, gaps)
    lengths = [len(message.text) for message in chat.messages]
    starts = [
        sum(pair)
        for pair in zip(
            accumulate(map(len, gaps[:-1])), accumulate(lengths, initial=0), strict=False
        )
    ]
    contents = tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))
    fixed = _independent_spans(chat, template, gaps, contents)
    return Layout(
        text, contents, tuple(_spans(chat, text, contents, fixed, closings(template, roles)))
    )


def _fill_gaps(gaps: Sequence[str], contents: Sequence[str]) -> str:
    return gaps[0] + "".join(chain.from_iterable(zip(contents, gaps[1:], strict=True)))


def _change_error(messages: Sequence[Message], template: ChatTemplate) -> str:
    """The error message for the first message whose text the template changes."""
    roles = [message.role for message in messages]
    gaps = template.gaps(roles, open_turn=True)
    for number, message in enumerate(messages):
        placeholders = ["x"] * len(messages)
        placeholders[number] = message.text
        if template.apply(zip(roles, placeholders, strict=True), open_turn=True) != _fill_gaps(
            gaps, placeholders
        ):
            shown = (
                message.text
                if len(message.text) <= 40
                else f"{message.text[:18]}…{message.text[-18:]}"
            )
            description = f"message {number + 1}, {message.role} {shown!r}"
            break
    else:
        description = "some of these messages"
    return (
        f"the chat template of {template.name} changes {description}, so its place in the prompt cannot be found;"
        " expected a text that the template leaves as it is, often one without spaces at its ends"
    )


def check_open_turn(template: ChatTemplate, roles: Sequence[str], gaps: Sequence[str]) -> None:
    """Raise ValueError unless the template opens an assistant's turn, or ends a user's turn where
    an answer begins."""
    if len(gaps[-1]) > len(template.gaps(roles, open_turn=False)[-1]):
        return
    open_gap = template.gaps(["user"], open_turn=True)[-1]
    answer_gap = template.gaps(["user", "assistant"], open_turn=False)[1]
    # Spaces before an answer belong to the answer, since its first token contains them.
    if roles[-1] != "user" or gaps[-1] != open_gap or answer_gap.rstrip() != open_gap.rstrip():
        raise ValueError(
            f"the chat template of {template.name} leaves no assistant turn open behind these messages;"
            " expected a template with add_generation_prompt"
        )


def _independent_spans(
    chat: Chat, template: ChatTemplate, gaps: Sequence[str], contents: Sequence[tuple[int, int]]
) -> dict[Unit, TextSpan]:
    units = [unit for unit in chat.units if unit.independent]
    roles = {
        unit: tuple(message.role for message in chat.messages[unit.start : unit.stop])
        for unit in units
    }
    wrappings = {kind: unit_wrapping(template, kind) for kind in dict.fromkeys(roles.values())}
    spans: dict[Unit, TextSpan] = {}
    previous_stop = 0
    for unit in units:
        wrapping = wrappings[roles[unit]]
        start = contents[unit.start][0] - len(wrapping.opening)
        before, *between, behind = gaps[unit.start : unit.stop + 1]
        is_wrapped = (
            before.endswith(wrapping.opening)
            and tuple(between) == wrapping.between
            and behind.startswith(wrapping.closing)
        )
        if start < previous_stop or not is_wrapped:
            raise ValueError(
                f"the chat template of {template.name} wraps message {unit.start + 1} by its place in this chat, so it"
                " cannot be an independent span; expected a template that wraps a message in the same way everywhere"
            )
        previous_stop = contents[unit.stop - 1][1] + len(wrapping.closing)
        spans[unit] = TextSpan(start, previous_stop, (unit.start, unit.stop), True)
    return spans


def _spans(
    chat: Chat,
    text: str,
    contents: Sequence[tuple[int, int]],
    fixed: dict[Unit, TextSpan],
    closing: dict[str, str],
) -> list[TextSpan]:
    """All spans in order: the fixed ones, and ordered text split after the known closing of each
    message."""
    spans: list[TextSpan] = []
    position = 0
    next_start = {unit.start: span.start for unit, span in fixed.items()}
    for unit in chat.units:
        if unit in fixed:
            _append_text(spans, position, fixed[unit].start, unit.start)
            spans.append(fixed[unit])
        else:
            end = contents[unit.start][1]
            closed = closing.get(chat.messages[unit.start].role, "")
            closed_at = end + len(closed) if text.startswith(closed, end) else end
            stop = min(closed_at, next_start.get(unit.stop, closed_at))
            spans.append(TextSpan(position, stop, (unit.start, unit.stop), False))
        position = spans[-1].stop
    _append_text(spans, position, len(text), len(chat.messages))
    return spans


def _append_text(spans: list[TextSpan], start: int, stop: int, message: int) -> None:
    """Append an ordered span for text between messages, unless the text is empty."""
    if start < stop:
        spans.append(TextSpan(start, stop, (message, message), False))


# ------------------------------------------------------------------------------
# A tokenizer with its chat template, loaded from a folder.
# ------------------------------------------------------------------------------

EXPECTED = "a folder with tokenizer.json and, beside it, tokenizer_config.json with chat_template"


class Encoded(NamedTuple):
    """Token ids, int32, shape (n,), and for each the half-open range of characters that it
    encodes."""

    tokens: Tokens
    characters: list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """Tokenizer and chat template, without torch and without transformers.

    `chat_template`  Jinja source, or None: an error only when a chat is rendered.
    `adds_bos`       whether the tokenizer adds `bos_token` before every text.
    `variables`      additional variables of the template, such as enable_thinking.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    adds_bos: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return self.tokenizer.get_vocab_size()

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; ValueError if there is none."""
        if not self.chat_template:
            raise ValueError(
                f"tokenizer={self.name} has no chat template; expected {EXPECTED}, or one given by hand"
            )
        special_tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        bos_and_eos = {name: token for name, token in special_tokens.items() if token is not None}
        # Some templates test whether these are none before they test whether they are defined.
        return ChatTemplate(
            self.name,
            self.chat_template,
            {"tools": None, "documents": None, **bos_and_eos, **self.variables},
        )

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the BOS token, or None if the tokenizer has none."""
        if self.bos_token is None:
            return None
        number = self.tokenizer.token_to_id(self.bos_token)
        if number is None:
            subject = f"bos_token={self.bos_token} of tokenizer={self.name}"
            raise ValueError(f"{subject} is not in its vocabulary; expected one of its tokens")
        return number

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        return tuple(
            token.content
            for token in self.tokenizer.get_added_tokens_decoder().values()
            if token.special
        )

    def encode(self, text: str) -> Tokens:
        """Token ids of a text, int32; special tokens in it are recognised, and no BOS is added."""
        return self.encode_with_offsets(text).tokens

    def encode_with_offsets(self, text: str, *, literal: bool = False) -> Encoded:
        """Token ids with their character ranges; `literal` encodes special tokens as plain
        characters."""
        tokenizer = self._literal_tokenizer if literal else self.tokenizer
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return Encoded(np.array(encoding.ids, dtype=np.int32), encoding.offsets)

    def decode(self, tokens: Tokens) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    @cached_property
    def _literal_tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        literal = Tokenizer.from_str(self.tokenizer.to_str())
        literal.encode_special_tokens = True
        return literal


def load_tokenizer(
    folder: Path, chat_template: str | None = None, variables: Mapping[str, object] | None = None
) -> ChatTokenizer:
    """Load tokenizer.json and the chat settings of tokenizer_config.json or chat_template.jinja.

    `chat_template` takes precedence over that of the folder. Raises ValueError if files of the
    folder are missing or invalid; a missing template is an error only when a chat is rendered.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"tokenizer={folder} holds no tokenizer.json; expected {EXPECTED}")
    if not isinstance(_json_object(file).get("model"), dict):
        raise ValueError(f"tokenizer={file} holds no model; expected {EXPECTED}")
    tokenizer = Tokenizer.from_buffer(file.read_bytes())
    # Files written for training may truncate or pad; a prompt is encoded unchanged.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_file = folder / "tokenizer_config.json"
    config = _json_object(config_file) if config_file.is_file() else {}
    prefix = tokenizer.encode("", add_special_tokens=True).tokens[:1]
    bos = _token_text(config.get("bos_token"))
    template_file = folder / "chat_template.jinja"
    if not chat_template and template_file.is_file():
        chat_template = template_file.read_text(encoding="utf-8")
    if not chat_template:
        configured = config.get("chat_template")
        if isinstance(configured, list):  # of named templates
            configured = {entry["name"]: entry["template"] for entry in configured}.get("default")
        if configured is not None and not isinstance(configured, str):
            raise ValueError(f"chat_template of tokenizer={folder} is no text; expected {EXPECTED}")
        chat_template = configured
    return ChatTokenizer(
        folder.resolve().name,
        tokenizer,
        chat_template,
        bos,
        _token_text(config.get("eos_token")),
        bos is not None and bool(config.get("add_bos_token", prefix == [bos])),
        variables or {},
    )


def _json_object(file: Path) -> dict[str, object]:
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"tokenizer={file} is not JSON ({error}); expected {EXPECTED}") from error
    if not isinstance(value, dict):
        raise ValueError(f"tokenizer={file} holds no JSON object; expected {EXPECTED}")
    return value


def _token_text(token: object) -> str | None:
    """Text of a special token of the configuration, which is a string or an object with one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


# ------------------------------------------------------------------------------
# The BOS token: added if the tokenizer requires it and the template omits it; an error inside
# the prompt.
# ------------------------------------------------------------------------------

# No two adjacent messages have the same role, since some templates reject that.
_ROLES = ("user", "assistant", "user")


def missing_bos(first: int | None, tokenizer: ChatTokenizer) -> Tokens:
    """The BOS id that the tokenizer adds, unless the template already wrote it as token `first`:
    one id or none."""
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return np.array([] if bos is None or first == bos else [bos], dtype=np.int32)


def check_bos(tokens: Tokens, tokenizer: ChatTokenizer) -> None:
    """Raise ValueError for a BOS inside the prompt, which would act as a second attention sink."""
    # If BOS and EOS are the same token, an occurrence inside the prompt may be an EOS.
    if tokenizer.bos_token is None or tokenizer.bos_token == tokenizer.eos_token:
        return
    repeated = np.flatnonzero(tokens[1:] == tokenizer.bos_id) + 1
    if len(repeated) and opens_messages(tokenizer.template, tokenizer.bos_token):
        repeated = repeated[tokens[repeated - 1] == tokenizer.bos_id]
    if len(repeated):
        raise ValueError(
            f"the chat template of {tokenizer.name} writes {tokenizer.bos_token} inside the prompt, at token"
            f" {repeated[0]}; expected one at the beginning and none elsewhere, or one before every message"
        )


def opens_messages(template: ChatTemplate, bos: str) -> bool:
    """Whether the template opens every message with the BOS, as SmolLM2's does with
    <|im_start|>."""
    *openings, closing = template.gaps(_ROLES, open_turn=False)
    return bos not in closing and all(bos in opening for opening in openings)


# ------------------------------------------------------------------------------
# A tokenizer built in code, for machines without tokenizer files: invented words, bytes and
# ChatML.
# ------------------------------------------------------------------------------

NUM_WORDS = 2000
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ROLE_WORDS = ("system", "user", "assistant")
_SYLLABLES = tuple(map("".join, product("bdfgklmnprstvz", "aeiou")))
# Coprime to the number of syllables, so that the sequence of three-syllable words has no
# repetition.
_STRIDE = 104_729


def invented_words() -> tuple[str, ...]:
    """The NUM_WORDS words of the vocabulary, three syllables each, identical on every machine."""
    count = len(_SYLLABLES)
    numbers = ((index * _STRIDE) % count**3 for index in range(1, NUM_WORDS + 1))
    return tuple(
        _SYLLABLES[n // count**2] + _SYLLABLES[n // count % count] + _SYLLABLES[n % count]
        for n in numbers
    )


def builtin_tokenizer() -> ChatTokenizer:
    """One token for each invented word, with or without a space before it, and one for each byte of
    all other text.

    Ids: 256 bytes, then the words and the names of the roles, each in both forms, then the special
    tokens; ChatML as the chat template; no BOS. Decoding restores every text exactly.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    word_tokens = (
        form for word in (*_ROLE_WORDS, *invented_words()) for form in (word, space + word)
    )
    vocabulary = (*sorted(pre_tokenizers.ByteLevel.alphabet()), *word_tokens)
    # Without merges, text is encoded as bytes, except for words that `ignore_merges` finds in the
    # vocabulary.
    model = models.BPE(
        {token: number for number, token in enumerate(vocabulary)}, [], ignore_merges=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS]
    )
    return ChatTokenizer("builtin", tokenizer, CHATML, eos_token="<|im_end|>")


@dataclass(frozen=True, slots=True)
class RenderedSpan:
    """One span of a rendered query.

    `characters`   half-open range in the text; empty for a BOS that the tokenizer adds.
    `tokens`       half-open range in the token ids.
    `roles`        roles of its messages; empty for text of the template alone, such as the open
                   turn.
    `independent`  as in `core.request.Span`.
    `reusable`     as in `core.request.Span`: true for ordered system messages, whose end other
                   requests share.
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
    `retokenisation_delta`  number of these tokens that tokenising the complete text would not give
                            at the same characters; 0: splitting at span ends changed nothing; None:
                            not measured.
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
            Span(
                self.tokens[slice(*span.tokens)],
                independent=span.independent,
                reusable=span.reusable,
            )
            for span in self.spans
        )


def describe(query: Query, tokenizer: ChatTokenizer, *, measure_delta: bool = True) -> Rendered:
    """Apply the chat template once and tokenise span by span.

    The ids of an independent span depend only on its messages and on the template, not on its
    neighbours or position, so that its keys and values are reusable anywhere. The prompt begins
    with a BOS if template or tokenizer add one; a BOS inside the prompt is allowed only if the
    template opens every message with it. A message that spells a special token cannot open or close
    a turn: its text is tokenised separately, with the special token as plain characters.
    `measure_delta` doubles the cost, because it tokenises the text a second time. Raises ValueError
    if the tokenizer has no template or if template and query are incompatible (see
    `layout.compute_layout`, `units.flatten`).
    """
    chat = flatten(query)
    layout = compute_layout(chat, tokenizer.template)
    encoded = [_encode(span, layout, tokenizer) for span in layout.spans]
    delta = None
    if measure_delta:
        complete = tokenizer.encode_with_offsets(layout.text)
        ours = Counter(
            pair
            for span in encoded
            for pair in zip(span.tokens.tolist(), span.characters, strict=True)
        )
        theirs = Counter(zip(complete.tokens.tolist(), complete.characters, strict=True))
        delta = (ours - theirs).total()
    first = next((int(span.tokens[0]) for span in encoded if len(span.tokens)), None)
    spans, ids = _token_ranges(chat, layout, encoded, missing_bos(first, tokenizer))
    if not spans:
        raise ValueError(
            f"query has no token in the chat template of {tokenizer.name}; expected some text"
        )
    tokens = np.concatenate(ids)
    check_bos(tokens, tokenizer)
    return Rendered(layout.text, layout.contents, tuple(spans), tokens, delta)


def _encode(span: TextSpan, layout: Layout, tokenizer: ChatTokenizer) -> Encoded:
    """Token ids of a span, with their character ranges in the complete text."""
    # contents that spell special tokens are tokenised separately, as plain characters
    ranges, position = [], span.start
    for start, stop in layout.contents[slice(*span.messages)]:
        content = layout.text[start:stop]
        if any(special in content for special in tokenizer.special_texts):
            ranges += [(position, start, False), (start, stop, True)]
            position = stop
    ranges.append((position, span.stop, False))
    tokens, characters = [np.empty(0, np.int32)], []
    for start, stop, literal in ranges:
        encoded = tokenizer.encode_with_offsets(layout.text[start:stop], literal=literal)
        tokens.append(encoded.tokens)
        characters += [(start + first, start + last) for first, last in encoded.characters]
    return Encoded(np.concatenate(tokens), characters)


def _token_ranges(
    chat: Chat, layout: Layout, encoded_spans: Sequence[Encoded], bos: Tokens
) -> tuple[list[RenderedSpan], list[Tokens]]:
    """Spans with token ranges; a BOS is added to an ordered first span, or is a span before an
    independent one."""
    spans: list[RenderedSpan] = []
    ids: list[Tokens] = []
    position = 0

    def append(
        characters: tuple[int, int], tokens: Tokens, roles: tuple[Role, ...], independent: bool
    ) -> None:
        nonlocal position
        spans.append(
            RenderedSpan(characters, (position, position + len(tokens)), roles, independent)
        )
        ids.append(tokens)
        position += len(tokens)

    for span, encoded in zip(layout.spans, encoded_spans, strict=True):
        tokens = encoded.tokens
        if not len(tokens):
            if span.independent:  # ordered text without tokens is allowed
                number = span.messages[0]
                raise ValueError(
                    f"message {number + 1}, {chat.messages[number].role}, is an independent span without any token;"
                    " expected some text"
                )
            continue
        if not spans and len(bos):
            if span.independent:
                append((0, 0), bos, (), False)
            else:
                tokens = np.concatenate([bos, tokens])
        roles = tuple(message.role for message in chat.messages[slice(*span.messages)])
        append((span.start, span.stop), tokens, roles, span.independent)
    return spans, ids
