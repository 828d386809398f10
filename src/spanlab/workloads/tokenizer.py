"""Finding a tokenizer: a file, a folder that holds one, or a name on the hub."""

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
    """A tokenizer's bytes; parsed only when something must be tokenised, because parsing is slow."""

    name: str
    content: bytes

    @cached_property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the tokenizer's file."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The parsed tokenizer, told to read special tokens in text as plain characters."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_buffer(self.content)
        # A document that spells out <|im_end|> must not be able to close its own turn.
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def marks(self) -> TurnMarks | None:
        """Turn marks of the chat template, or None if this vocabulary has none."""
        ids = [self.tokenizer.token_to_id(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        if None in ids:
            return None
        return TurnMarks(*(np.array([number], dtype=np.int32) for number in ids))


def find_tokenizer(where: str | Path | None) -> TokenizerFile:
    """Load a tokenizer's file; raise SourceUnavailable, naming `workload.tokenizer`, if it cannot be had."""
    if where is None:
        raise SourceUnavailable(f"workload.tokenizer is not set and text needs one; expected {EXPECTED}")
    where = installed_model(where)
    path = Path(where)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return _checked(_name(file), file, file)
    if isinstance(where, Path) or path.suffix == ".json" or path.is_absolute() or str(where).startswith("."):
        raise SourceUnavailable(f"workload.tokenizer={where} does not exist; expected {EXPECTED}")
    return _checked(str(where).rsplit("/", 1)[-1], _download(str(where)), where)


def _checked(name: str, file: Path, where: str | Path) -> TokenizerFile:
    content = file.read_bytes()
    try:
        model = orjson.loads(content)["model"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"workload.tokenizer={where} is not a tokenizer file; expected {EXPECTED}") from error
    assert model is not None, f"a tokenizer file without a model: {name}"
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
            f"workload.tokenizer={name} cannot be had from the hub ({type(error).__name__}); expected {EXPECTED}"
        ) from error
