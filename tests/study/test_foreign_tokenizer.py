"""A tokenizer of another model is reported in one sentence."""

from pathlib import Path

import pytest

from spanlab.analyses.base import foreign_tokenizer
from spanlab.cli import compose
from spanlab.queries import builtin_tokenizer


def caveats_of(*settings: str, entry: str = "quality_sim") -> tuple[str, ...]:
    return foreign_tokenizer(compose(entry, list(settings)))


def test_lengths_of_another_tokenizer_are_reported():
    assert caveats_of("model=qwen3.5-0.8b") == (
        "tokens are those of the qwen2 tokenizer, 151,646 of them, and not qwen3.5-0.8b's own, whose vocabulary has "
        "248,320: lengths differ",
    )


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "qwen3-8b", "tiny-hybrid"])
def test_own_tokenizers_and_made_up_models_are_not(model):
    assert caveats_of(f"model={model}", "arms=attention", entry="rag_sim") == ()


def test_content_ids_have_no_tokenizer():
    assert caveats_of("model=qwen3.5-0.8b", "workload=ragpulse") == ()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(builtin_tokenizer().tokenizer.to_str())
    return tmp_path


def test_a_tokenizer_of_a_file_is_compared_too(tokenizer):
    overrides = ("workload=questions", "model=qwen3.5-0.8b")
    (sentence,) = caveats_of(*overrides, f"workload.tokenizer={tokenizer}")
    assert sentence.startswith(f"tokens are those of the {tokenizer.name} tokenizer, ")
    assert caveats_of(*overrides) == ()
