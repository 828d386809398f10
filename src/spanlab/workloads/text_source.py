"""Corpora of text documents: find the tokenizer, tokenise or read the cache, record the provenance."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from spanlab.models.hub import look_for_network
from spanlab.workloads.cache import cache_key, load_or_build
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.encoding import encode_documents, encode_parts
from spanlab.workloads.files import JsonRow, SourceUnavailable
from spanlab.workloads.joints import Joints
from spanlab.workloads.prompts import Document, Layout, Question
from spanlab.workloads.shape import shared_length
from spanlab.workloads.tokenizer import TokenizerFile, find_tokenizer
from spanlab.workloads.workload import ProvenanceKind

#: Two questions whose last tokens differ, so that their prompts share only the answer's opening as a suffix.
PROBES = (Question("A"), Question("B?"))


def text_corpus(
    about: tuple[str, ProvenanceKind, str],
    documents: Sequence[Document],
    layout: Layout,
    tokenizer: str | Path | None,
    cache_dir: Path | None,
) -> Corpus:
    """Make the corpus of `documents`.

    `about`  name, provenance, and start of the detail, with placeholders `{documents}` and `{requests}`
    """
    name, kind, nouns = about
    check_not_empty(name, documents)
    tokenizer_file = find_tokenizer(tokenizer)
    key = cache_key(name, documents, layout, tokenizer_file.sha256)
    text = load_or_build(cache_dir, key, lambda: encode_documents(documents, layout, tokenizer_file))
    corpus = text.corpus(name, kind, f"{nouns}, {tokenizer_file.name} tokenizer")
    return replace(corpus, joints=partial(joints_of, layout, tokenizer_file))


def joints_of(layout: Layout, tokenizer: TokenizerFile) -> Joints:
    """Return the joints of a layout's prompts in tokens of `tokenizer`."""
    marks = tokenizer.marks
    separator = encode_parts(layout.separator(marks), tokenizer)
    first, second = (encode_parts(layout.question(probe, marks), tokenizer) for probe in PROBES)
    answer = shared_length(first[::-1], second[::-1])
    opening = first[len(first) - answer :]
    return Joints(separator, shared_length(separator, first), shared_length(separator, opening), answer)


def check_not_empty(name: str, documents: Sequence[Document]) -> None:
    """Raise ValueError for a source without questions or with an empty document."""
    if not any(document.questions for document in documents):
        raise ValueError(f"workload.kind={name} has a source without any question; expected at least one")
    for number, document in enumerate(documents):
        if len(document.body) == 0:
            raise ValueError(f"workload.kind={name} has an empty document, number {number}; expected text in each")


def hub_rows(dataset: str, split: str, expected: str) -> Iterator[JsonRow]:
    """Load the rows of one split from the hub or its local cache; raise SourceUnavailable if neither has it.

    `expected`  content of the rows, for error messages
    """
    look_for_network()
    import datasets

    # The client logs every retry, and one error at the end is enough.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        rows = datasets.load_dataset(dataset, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise SourceUnavailable(
            f"workload.source=hub cannot load {dataset} ({type(error).__name__}); expected a reachable hub"
        ) from error
    return (JsonRow(row, f"workload.source=hub row {number} of {dataset}", expected) for number, row in enumerate(rows))
