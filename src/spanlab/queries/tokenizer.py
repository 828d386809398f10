"""A tokenizer with its chat template, loaded from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import orjson

from spanlab.core.request import Tokens
from spanlab.queries.template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EXPECTED = "a folder with tokenizer.json and, beside it, tokenizer_config.json with chat_template"


class Encoded(NamedTuple):
    """Token ids, int32, shape (n,), and for each the half-open range of characters that it encodes."""

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
            raise ValueError(f"tokenizer={self.name} has no chat template; expected {EXPECTED}, or one given by hand")
        special_tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        bos_and_eos = {name: token for name, token in special_tokens.items() if token is not None}
        # Some templates test whether these are none before they test whether they are defined.
        return ChatTemplate(
            self.name, self.chat_template, {"tools": None, "documents": None, **bos_and_eos, **self.variables}
        )

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the BOS token, or None if the tokenizer has none."""
        return None if self.bos_token is None else self._special_id("bos_token", self.bos_token)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        return tuple(token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special)

    def encode(self, text: str) -> Tokens:
        """Token ids of a text, int32; special tokens in it are recognised, and no BOS is added."""
        return self.encode_with_offsets(text).tokens

    def encode_with_offsets(self, text: str, *, literal: bool = False) -> Encoded:
        """Token ids with their character ranges; `literal` encodes special tokens as plain characters."""
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

    def _special_id(self, key: str, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(
                f"{key}={token} of tokenizer={self.name} is not in its vocabulary; expected one of its tokens"
            )
        return number


def load_tokenizer(
    folder: Path, chat_template: str | None = None, variables: Mapping[str, object] | None = None
) -> ChatTokenizer:
    """Load tokenizer.json and the chat settings of tokenizer_config.json or chat_template.jinja.

    `chat_template` takes precedence over that of the folder. Raises ValueError if files of the folder are missing or
    invalid; a missing template is an error only when a chat is rendered.
    """
    tokenizer = _tokenizer(folder)
    config_file = folder / "tokenizer_config.json"
    config = _json_object(config_file) if config_file.is_file() else {}
    prefix = tokenizer.encode("", add_special_tokens=True).tokens[:1]
    bos = _token_text(config.get("bos_token"))
    return ChatTokenizer(
        folder.resolve().name,
        tokenizer,
        chat_template or _template_file(folder) or _configured_template(config, folder),
        bos,
        _token_text(config.get("eos_token")),
        bos is not None and bool(config.get("add_bos_token", prefix == [bos])),
        variables or {},
    )


def _tokenizer(folder: Path) -> Tokenizer:
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
    return tokenizer


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


def _template_file(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _configured_template(config: Mapping[str, object], folder: Path) -> str | None:
    """The template of the configuration: a string, or the entry `default` of a list of named templates."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template of tokenizer={folder} is no text; expected {EXPECTED}")
    return template
