"""Check whether a study counts tokens with a tokenizer of another model."""

from __future__ import annotations

from typing import NamedTuple

from spanlab.settings import Study, WorkloadSettings
from spanlab.workloads.shape import committed, committed_names
from spanlab.workloads.tokenizer import find_tokenizer

#: Vocabulary sizes of the tokenizers that committed shapes were measured with.
_OF_SHAPES = {"qwen2": 151_646}
#: Models with a smaller vocabulary are synthetic and have no tokenizer.
_LEAST_VOCABULARY = 16_384
#: Rows of an embedding table are rounded up for the device; real models leave fewer of them unused.
_MOST_UNUSED = 0.02


class _Tokenizer(NamedTuple):
    name: str
    tokens: int


def foreign_tokenizer(study: Study) -> tuple[str, ...]:
    """One caveat where the tokenizer's vocabulary cannot be the model's; empty where no text was tokenized."""
    tokenizer, rows = _tokenizer(study.workload), study.model.vocab_size
    if tokenizer is None or rows < _LEAST_VOCABULARY or (1 - _MOST_UNUSED) * rows <= tokenizer.tokens <= rows:
        return ()
    return (
        f"tokens are those of the {tokenizer.name} tokenizer, {tokenizer.tokens:,} of them, "
        f"and not {study.model.name}'s own, whose vocabulary has {rows:,}: lengths differ",
    )


def _tokenizer(workload: WorkloadSettings) -> _Tokenizer | None:
    if workload.tokenizer is not None:
        file = find_tokenizer(workload.tokenizer)
        return _Tokenizer(file.name, file.tokenizer.get_vocab_size())
    if workload.source != "shape" or workload.path is not None or workload.kind not in committed_names():
        return None
    tokenizer = committed(workload.kind, None).meta.get("tokenizer")
    return None if tokenizer is None else _Tokenizer(tokenizer["name"], _OF_SHAPES[tokenizer["name"]])
