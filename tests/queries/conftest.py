"""Variants of the built-in tokenizer for the query tests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spanlab.queries import ChatTokenizer, builtin_tokenizer

from ..support.shared import DATA

BUILTIN = builtin_tokenizer()


@pytest.fixture
def builtin() -> ChatTokenizer:
    """The built-in tokenizer with ChatML."""
    return BUILTIN


@pytest.fixture
def with_template() -> Callable[..., ChatTokenizer]:
    """The built-in tokenizer, called toy, with another chat template and other fields."""

    def make(chat_template: str | None, **fields: object) -> ChatTokenizer:
        return replace(BUILTIN, name="toy", chat_template=chat_template, **fields)

    return make


@pytest.fixture
def qwen2_folder() -> Path:
    """A real byte-level tokenizer without a chat template, which a checkout alone does not have."""
    folder = DATA / "tokenizers" / "qwen2"
    if not folder.is_dir():
        pytest.skip("needs the shared tokenizers")
    return folder
