"""Conversations of the Mooncake trace: lengths, and which prompts begin alike, block by block; no text.

The trace (FAST'25, Apache-2.0) lists for each prompt the ids of its blocks of 512 tokens. An id names a block and all
before it, so prompts share exactly the ids that they have in common. Times are left out: they are rounded to three
seconds, and the sample below is a part of the load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from spanlab.workloads.corpus import Corpus
from spanlab.workloads.files import field, file_sha256, read_jsonl
from spanlab.workloads.selection import Selection, refuse_cut
from spanlab.workloads.shape import FORMAT_VERSION, REUSABLE, Shape, committed
from spanlab.workloads.source import workload
from spanlab.workloads.workload import ProvenanceKind

KEY = "workload.path"
EXPECTED = "conversation_trace.jsonl of Mooncake, FAST'25"
BLOCK = 512  # tokens
LONGEST = 65_536  # tokens of a prompt; a conversation with a longer one is left out
SAMPLE = 1_000  # requests: whole conversations are drawn until there are so many
SEED = 0

Ids = tuple[int, ...]


@workload("conversation", "shape")
def measured(selection: Selection, path: Path | None = None) -> Corpus:
    """The committed sample, or what make_shape left of a trace at `path`."""
    return _uncut(committed("conversation", path), selection)


@workload("conversation", "local")
def local(path: Path, selection: Selection) -> Corpus:
    """The same sample of the original file."""
    return _uncut(read(path, "local trace"), selection)


def _uncut(shape: Shape, selection: Selection) -> Corpus:
    refuse_cut("conversation", selection, "no limit on recorded prompts")
    return shape.corpus()


def read(path: Path, kind: ProvenanceKind) -> Shape:
    """A sample of whole conversations, in the order of the trace; groups are conversations.

    The opening that all prompts share, one block, is marked reusable; the trace tells no other boundary.
    """
    rows = read_jsonl(path, KEY, EXPECTED)
    prompts = [tuple(field(row, "hash_ids", path, KEY, EXPECTED, list)) for row in rows]
    lengths = np.array([field(row, "input_length", path, KEY, EXPECTED, int) for row in rows], dtype=np.int64)
    chosen = _sample(prompts, lengths)
    spans, requests = _spans([prompts[at] for at in chosen], lengths[chosen])
    flags = np.zeros(len(spans), dtype=np.uint8)
    flags[list({request[0] for request in requests})] = REUSABLE
    return Shape(
        lengths=np.array(spans, dtype=np.int64),
        lcps=np.zeros(len(spans), dtype=np.int64),
        flags=flags,
        request_spans=np.array([span for request in requests for span in request], dtype=np.int64),
        span_counts=np.array([len(request) for request in requests], dtype=np.int64),
        groups=np.array(_conversations([prompts[at] for at in chosen]), dtype=np.int64),
        output_lens=np.array([field(rows[at], "output_length", path, KEY, EXPECTED, int) for at in chosen]),
        meta=_about(path, kind),
    )


def _about(path: Path, kind: ProvenanceKind) -> dict[str, Any]:
    detail = "Mooncake conversation trace, {requests} requests of {documents} sampled conversations"
    told = {"format": FORMAT_VERSION, "name": "conversation", "kind": kind, "detail": detail}
    return told | {"inputs": {path.name: file_sha256(path)}}


def _sample(prompts: Sequence[Ids], lengths: np.ndarray) -> list[int]:
    """Requests of components of prompts that share more than the block that all begin with; drawn whole."""
    members: dict[Ids, list[int]] = {}
    for at, prompt in enumerate(prompts):
        members.setdefault(prompt[:2] if len(prompt) > 1 else (-1, at), []).append(at)
    fitting = [own for own in members.values() if lengths[own].max() <= LONGEST]
    drawn: list[int] = []
    for number in np.random.default_rng(SEED).permutation(len(fitting)).tolist():
        if len(drawn) >= SAMPLE:
            break
        drawn += fitting[number]
    return sorted(drawn)


def _conversations(prompts: Sequence[Ids]) -> list[int]:
    """Of each prompt the number of its conversation: that of the prompt that it continues, the latest such one.

    A prompt continues another where it holds all its blocks but the last, which need not be full.
    """
    ends: dict[int, int] = {}
    numbers: list[int] = []
    for prompt in prompts:
        number = next((ends[block] for block in reversed(prompt[1:]) if block in ends), None)
        numbers.append(len(set(numbers)) if number is None else number)
        if len(prompt) > 2:
            ends[prompt[-2]] = numbers[-1]
    return numbers


def _spans(prompts: Sequence[Ids], lengths: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """Lengths of spans, and each prompt as span numbers: consecutive blocks that the same prompts hold are one span."""
    uses = Counter(block for prompt in prompts for block in prompt)
    numbers: dict[tuple[int, int], int] = {}
    sizes: list[int] = []
    requests = []
    for prompt, length in zip(prompts, lengths.tolist(), strict=True):
        request = []
        for first, size in _runs(prompt, length, uses):
            if (first, size) not in numbers:
                numbers[first, size] = len(sizes)
                sizes.append(size)
            request.append(numbers[first, size])
        requests.append(request)
    return sizes, requests


def _runs(prompt: Ids, length: int, uses: Counter[int]) -> Iterator[tuple[int, int]]:
    """First block and tokens of each run of blocks that are used equally often; of chained ids the same prompts do."""
    start = 0
    for _, run in groupby(enumerate(prompt), key=lambda block: uses[block[1]]):
        blocks = list(run)
        stop = min(length, (blocks[-1][0] + 1) * BLOCK)
        yield blocks[0][1], stop - start
        start = stop
