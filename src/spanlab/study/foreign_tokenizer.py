"""Whether a study counts tokens by another tokenizer than its model's own."""

from __future__ import annotations

from typing import NamedTuple

from spanlab.settings import Study, WorkloadSettings
from spanlab.workloads.shape import committed, committed_names
from spanlab.workloads.tokenizer import find_tokenizer

#: Vocabularies of the tokenizers that committed shapes were measured with.
_OF_SHAPES = {"qwen2": 151_646}
#: Models with fewer tokens are made up and have no tokenizer of their own.
_LEAST_VOCABULARY = 16_384
#: Rows of an embedding table are rounded up for the device; real models leave fewer of them unused.
_MOST_UNUSED = 0.02


class _Tokenizer(NamedTuple):
    name: str
    tokens: int


def foreign_tokenizer(study: Study) -> tuple[str, ...]:
    """One sentence where the tokenizer's vocabulary cannot be the model's; none where no text was tokenised."""
    found, rows = _tokenizer(study.workload), study.model.vocab_size
    if found is None or rows < _LEAST_VOCABULARY or (1 - _MOST_UNUSED) * rows <= found.tokens <= rows:
        return ()
    return (
        f"tokens are those of the {found.name} tokenizer, {found.tokens:,} of them, and not {study.model.name}'s own, "
        f"whose vocabulary has {rows:,}: lengths differ",
    )


def _tokenizer(workload: WorkloadSettings) -> _Tokenizer | None:
    if workload.tokenizer is not None:
        file = find_tokenizer(workload.tokenizer)
        return _Tokenizer(file.name, file.tokenizer.get_vocab_size())
    if workload.source != "shape" or workload.path is not None or workload.kind not in committed_names():
        return None
    told = committed(workload.kind, None).meta.get("tokenizer")
    return None if told is None else _Tokenizer(told["name"], _OF_SHAPES[told["name"]])
