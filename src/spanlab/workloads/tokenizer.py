"""Lookup of a tokenizer: a file, a folder with one, a packaged model, or a name on the hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from spanlab.models.hub import look_for_network
from spanlab.models.packaged import installed_model
from spanlab.workloads.files import SourceUnavailable
from spanlab.workloads.prompts import TurnMarks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EXPECTED = "a tokenizer.json, a folder that holds one, a packaged model, or a hub name"


@dataclass(frozen=True)
class TokenizerFile:
    """The bytes of a tokenizer file; it is parsed on first use, because parsing is slow."""

    name: str
    content: bytes

    @cached_property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the tokenizer's file."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The parsed tokenizer, which encodes special tokens in text as plain characters."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_buffer(self.content)
        except ValueError as error:
            raise ValueError(
                f"workload.tokenizer={self.name} is not a tokenizer file ({error}); expected {EXPECTED}"
            ) from error
        # A document that contains the text <|im_end|> must not close its turn.
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def marks(self) -> TurnMarks | None:
        """Turn marks of the chat template, or None if the vocabulary has none."""
        ids = [self.tokenizer.token_to_id(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        if None in ids:
            return None
        return TurnMarks(*(np.array([number], dtype=np.int32) for number in ids))


def find_tokenizer(source: str | Path | None) -> TokenizerFile:
    """Load a tokenizer's file; raise SourceUnavailable, naming `workload.tokenizer`, if it is not available."""
    if source is None:
        raise SourceUnavailable(f"workload.tokenizer is not set and text needs one; expected {EXPECTED}")
    source = installed_model(source)
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return _load(_name(file), file, file)
    if isinstance(source, Path) or path.suffix == ".json" or path.is_absolute() or str(source).startswith("."):
        raise SourceUnavailable(f"workload.tokenizer={source} does not exist; expected {EXPECTED}")
    return _load(str(source).rsplit("/", 1)[-1], _download(str(source)), source)


def _load(name: str, file: Path, source: str | Path) -> TokenizerFile:
    content = file.read_bytes()
    try:
        model = orjson.loads(content)["model"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"workload.tokenizer={source} is not a tokenizer file; expected {EXPECTED}") from error
    if model is None:
        raise ValueError(f"workload.tokenizer={source} has model=null; expected {EXPECTED}")
    return TokenizerFile(name, content)


def _name(file: Path) -> str:
    return file.resolve().parent.name if file.name == "tokenizer.json" else file.stem


def _download(name: str) -> Path:
    look_for_network()
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hf_hub_download(name, "tokenizer.json"))
    except (OSError, HFValidationError) as error:
        raise SourceUnavailable(
            f"workload.tokenizer={name} cannot be loaded from the hub ({type(error).__name__}); expected {EXPECTED}"
        ) from error
