"""From documents in text form to a corpus: find the tokenizer, tokenise or read the cache, state the provenance."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spanlab.models.hub import look_for_network
from spanlab.workloads.cache import cache_key, cached
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.encoding import encode_documents, encode_parts
from spanlab.workloads.files import SourceUnavailable
from spanlab.workloads.joints import Joints
from spanlab.workloads.prompts import Document, Layout, Question
from spanlab.workloads.shape import shared_length
from spanlab.workloads.tokenizer import TokenizerFile, find_tokenizer
from spanlab.workloads.workload import ProvenanceKind

#: Two questions whose last tokens differ, so that their prompts end alike in nothing but the answer's opening.
PROBES = (Question("A"), Question("B?"))


def text_corpus(
    about: tuple[str, ProvenanceKind, str],
    documents: Sequence[Document],
    layout: Layout,
    tokenizer: str | Path | None,
    cache_dir: Path | None,
) -> Corpus:
    """Make the corpus of `documents`.

    `about`  its name, its provenance, and the start of its detail, with `{documents}` and `{requests}`
    """
    name, kind, nouns = about
    refuse_nothing(name, documents)
    found = find_tokenizer(tokenizer)
    key = cache_key(name, documents, layout, found.sha256)
    text = cached(cache_dir, key, lambda: encode_documents(documents, layout, found))
    corpus = text.corpus(name, kind, f"{nouns}, {found.name} tokenizer")
    return replace(corpus, joints=partial(joints_of, layout, found))


def joints_of(layout: Layout, tokenizer: TokenizerFile) -> Joints:
    """The joints of a layout's prompts in the tokens of `tokenizer`."""
    marks = tokenizer.marks
    separator = encode_parts(layout.separator(marks), tokenizer)
    one, other = (encode_parts(layout.question(probe, marks), tokenizer) for probe in PROBES)
    answer = shared_length(one[::-1], other[::-1])
    opening = one[len(one) - answer :]
    return Joints(separator, shared_length(separator, one), shared_length(separator, opening), answer)


def refuse_nothing(name: str, documents: Sequence[Document]) -> None:
    """Raise ValueError for a source without any question or with an empty document."""
    if not any(document.questions for document in documents):
        raise ValueError(f"workload.kind={name} has a source without any question; expected at least one")
    for number, document in enumerate(documents):
        if len(document.body) == 0:
            raise ValueError(f"workload.kind={name} has an empty document, number {number}; expected text in each")


def hub_rows(dataset: str, split: str) -> Any:
    """Load one split from the hub, row by row; raise SourceUnavailable if it can be had neither there nor from its
    local cache."""
    look_for_network()
    import datasets

    # its client narrates every retry; one sentence at the end says it all
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        return datasets.load_dataset(dataset, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise SourceUnavailable(
            f"workload.source=hub cannot load {dataset} ({type(error).__name__}); expected a reachable hub"
        ) from error
