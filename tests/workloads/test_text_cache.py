"""A text is tokenised once."""

from pathlib import Path

import numpy as np
import pytest

from spanlab.workloads.text import QUALITY, Document, Question, cache_key

from .factories import load_workload, token_lists


def test_a_second_load_reads_the_cache_and_does_not_tokenise(quality_files, tmp_path: Path, monkeypatch):
    cache = tmp_path / "cache"
    first = load_workload("quality", "local", cache_dir=cache, **quality_files)
    monkeypatch.setattr("spanlab.workloads.text.encode_documents", _refuse)
    second = load_workload("quality", "local", cache_dir=cache, **quality_files)
    for before, after in zip(first.requests, second.requests, strict=True):
        assert [span.tokens.tolist() for span in before.spans] == [span.tokens.tolist() for span in after.spans]
        assert [span.tokens.dtype for span in after.spans] == [np.dtype(np.int32)] * 3
        for key in ("answer", "output_len", "boundaries"):
            assert getattr(before, key) == getattr(after, key)
    assert first.provenance == second.provenance


def _refuse(*_):
    raise AssertionError("tokenised again")


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:300], lambda content: b"x" * 50])
def test_a_corrupt_cache_file_is_rebuilt(quality_files, tmp_path: Path, damage):
    cache = tmp_path / "cache"
    first = load_workload("quality", "local", cache_dir=cache, **quality_files)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    second = load_workload("quality", "local", cache_dir=cache, **quality_files)
    assert token_lists(first) == token_lists(second)
    assert entry.read_bytes() == whole
    assert list(cache.iterdir()) == [entry]


def test_the_cache_key_depends_on_everything_that_decides_the_tokens():
    def key(name="n", body="text", question="q", answer="a", tokenizer="t"):
        return cache_key(name, [Document(body, (Question(question, answers=(answer,)),))], QUALITY, tokenizer)

    keys = [key(name="m"), key(body="texts"), key(question="p"), key(answer="b"), key(tokenizer="u")]
    assert len({key(), *keys}) == 6
    assert key() == key()
