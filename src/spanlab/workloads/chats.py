"""Workloads of conversations: recorded ones, and modelled chat sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from spanlab.core.request import Request, Span
from spanlab.kinds import check_fields, field
from spanlab.registry import not_negative, positive
from spanlab.workloads.files import LARGEST_TOKEN, JsonRow, file_sha256, read_jsonl, shorten
from spanlab.workloads.load import WORKLOADS, Drawn, OfFile, Selected, WithPreamble
from spanlab.workloads.shape import FORMAT_VERSION, REUSABLE, Shape, committed
from spanlab.workloads.workload import (
    Corpus,
    FreshIds,
    Provenance,
    ProvenanceKind,
    Workload,
    workload,
)

# ------------------------------------------------------------------------------
# Conversations of the Mooncake trace: prompt lengths and shared prefixes by block, without
# text.
#
# The trace (FAST'25, Apache-2.0) lists for each prompt the ids of its blocks of 512 tokens. An
# id identifies a block and its whole prefix, so two prompts share exactly the blocks whose ids
# they have in common. Arrival times are not used: they are rounded to three seconds, and the
# sample below is a part of the load.
# ------------------------------------------------------------------------------

KEY = "workload.path"
EXPECTED = "conversation_trace.jsonl of Mooncake, FAST'25"
BLOCK = 512  # tokens
LONGEST = 65_536  # tokens of a prompt; conversations with a longer prompt are excluded
SAMPLE = 1_000  # requests; complete conversations are drawn until the sample has this many
SEED = 0

Ids = tuple[int, ...]


@dataclass
@WORKLOADS.register("conversation")
class Conversation(Drawn, WithPreamble, Selected, OfFile):
    """Conversations of the Mooncake trace: measured lengths and shared blocks, without its
    times."""


@workload("conversation", "shape")
def measured(path: Path | None = None) -> Corpus:
    """Return the committed sample, or the shape that make_shape wrote to `path`."""
    return committed("conversation", path).corpus()


@workload("conversation", "local")
def local(path: Path) -> Corpus:
    """Return the same sample, read from the original file."""
    return read_trace(path, "local trace").corpus()


def read_trace(path: Path, kind: ProvenanceKind) -> Shape:
    """Return a sample of complete conversations in the order of the trace; groups are
    conversations.

    The first block, which all prompts share, is marked reusable; the trace has no other boundaries.
    """
    rows = read_jsonl(path, KEY, EXPECTED)
    lengths = np.array([_count(row, "input_length", 1) for row in rows], dtype=np.int64)
    prompts = []
    for row, length in zip(rows, lengths.tolist(), strict=True):
        ids, count = row.field("hash_ids", list), -(-length // BLOCK)
        if len(ids) != count or not all(isinstance(block, int) for block in ids):
            expected = (
                f"{count} whole numbers, one for each {BLOCK} of {length} tokens, as {EXPECTED}"
            )
            raise row.error(f"hash_ids={shorten(ids)}", expected)
        prompts.append(tuple(ids))
    sample = _sample(prompts, lengths)
    spans, requests = _spans([prompts[index] for index in sample], lengths[sample])
    flags = np.zeros(len(spans), dtype=np.uint8)
    flags[list({request[0] for request in requests})] = REUSABLE
    return Shape(
        lengths=np.array(spans, dtype=np.int64),
        lcps=np.zeros(len(spans), dtype=np.int64),
        flags=flags,
        request_spans=np.array([span for request in requests for span in request], dtype=np.int64),
        span_counts=np.array([len(request) for request in requests], dtype=np.int64),
        groups=np.array(_conversations([prompts[index] for index in sample]), dtype=np.int64),
        output_lens=np.array([_count(rows[index], "output_length", 0) for index in sample]),
        meta={
            "format": FORMAT_VERSION,
            "name": "conversation",
            "kind": kind,
            "detail": "Mooncake conversation trace, {requests} requests of {documents} sampled conversations",
            "inputs": {path.name: file_sha256(path)},
        },
    )


def _count(row: JsonRow, name: str, least: int) -> int:
    count: int = row.field(name, int)
    if not least <= count <= LARGEST_TOKEN:
        raise row.error(f"{name}={count}", f"a whole number from {least} up, as {EXPECTED}")
    return count


def _sample(prompts: Sequence[Ids], lengths: np.ndarray) -> list[int]:
    """Return the request indexes of randomly drawn components: prompts that share more than the
    first block."""
    members: dict[Ids, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt[:2] if len(prompt) > 1 else (-1, index), []).append(index)
    fitting = [indexes for indexes in members.values() if lengths[indexes].max() <= LONGEST]
    drawn: list[int] = []
    for number in np.random.default_rng(SEED).permutation(len(fitting)).tolist():
        if len(drawn) >= SAMPLE:
            break
        drawn += fitting[number]
    return sorted(drawn)


def _conversations(prompts: Sequence[Ids]) -> list[int]:
    """Return the conversation number of each prompt: the number of the latest prompt that it
    continues.

    A prompt continues another if it contains all blocks of the other but the last one, which may be
    partial.
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
    """Return span lengths and the span numbers of each prompt; consecutive blocks of the same
    prompts form a span."""
    uses = Counter(block for prompt in prompts for block in prompt)
    numbers: dict[tuple[int, int], int] = {}
    sizes: list[int] = []
    requests = []
    for prompt, length in zip(prompts, lengths.tolist(), strict=True):
        request, start = [], 0
        # ids are chained, so blocks with equal use counts that follow each other belong to the
        # same prompts
        for _, run in groupby(enumerate(prompt), key=lambda block: uses[block[1]]):
            blocks = list(run)
            stop = min(length, (blocks[-1][0] + 1) * BLOCK)
            first, size, start = blocks[0][1], stop - start, stop
            if (first, size) not in numbers:
                numbers[first, size] = len(sizes)
                sizes.append(size)
            request.append(numbers[first, size])
        requests.append(request)
    return sizes, requests


# ------------------------------------------------------------------------------
# Synthetic conversations: the prompt of each turn is the history, with answers, plus a new
# message.
# ------------------------------------------------------------------------------


def _one_or_more(key: str, value: float) -> None:
    if value < 1:
        raise ValueError(f"{key}={value}: expected 1 or more")


@dataclass
class ChatSessions:
    """Conversations of several tenants; lengths and think times are drawn from exponential
    distributions."""

    sessions: int = field(100, positive, "conversations")
    turns: float = field(6.0, _one_or_more, "mean number of turns, geometric, at least one")
    tenants: int = field(4, positive, "tenants; each has its own system prompt")
    tenant_zipf: float = field(0.0, not_negative, "exponent of the tenants' popularity; 0: uniform")
    system_tokens: int = field(1024, positive, "length of every system prompt")
    message_tokens: float = field(256.0, positive, "mean length of a message")
    answer_tokens: float = field(128.0, positive, "mean length of an answer")
    think_s: float = field(
        10.0, not_negative, "mean seconds between an answer and the next message"
    )
    seed: int = field(0, not_negative, "seed of the draws")

    def __post_init__(self) -> None:
        check_fields(self, "workload.chat_sessions")


@dataclass
@WORKLOADS.register("chat_sessions")
class ChatSessionsWorkload(Drawn):
    """Generated conversations of several tenants: the history grows by known answers, and think
    times are drawn."""

    chat_sessions: ChatSessions = field(
        ChatSessions, None, "number and lengths of the conversations"
    )


@workload("chat_sessions")
def modelled(chat_sessions: ChatSessions) -> Workload:
    """Return the turns of each conversation, one group per conversation; `wait_ns` holds the think
    times."""
    options, ids = chat_sessions, FreshIds()
    systems = [Span(ids.take(options.system_tokens), reusable=True) for _ in range(options.tenants)]
    requests: list[Request] = []
    seeds = np.random.SeedSequence(options.seed).spawn(options.sessions + 1)
    rng = np.random.default_rng(seeds[-1])
    weights = np.arange(1, options.tenants + 1, dtype=np.float64) ** -options.tenant_zipf
    drawn: list[int] = rng.choice(
        options.tenants, options.sessions, p=weights / weights.sum()
    ).tolist()
    for group, tenant in enumerate(drawn):
        draw = np.random.default_rng(seeds[group])
        turns = int(draw.geometric(1 / options.turns))
        messages = _lengths(draw, options.message_tokens, turns)
        answers = _lengths(draw, options.answer_tokens, turns)
        think_ns = np.rint(draw.standard_exponential(turns) * options.think_s * 1e9)
        waits = think_ns.astype(np.int64).tolist()
        history: tuple[Span, ...] = (systems[tenant],)
        for turn in range(turns):
            # the end of every message but the last is a boundary
            history += (Span(ids.take(messages[turn]), reusable=turn + 1 < turns),)
            answer = ids.take(answers[turn])
            wait = waits[turn] if turn else 0
            requests.append(
                Request(len(requests), group, history, len(answer), output=answer, wait_ns=wait)
            )
            history += (Span(answer),)
    detail = (
        f"{options.sessions:,} conversations of {options.tenants} tenants, {len(requests):,} turns, "
        f"mean think time {options.think_s:g} s"
    )
    return Workload("chat sessions", tuple(requests), Provenance("modelled", detail))


def _lengths(draw: np.random.Generator, mean: float, count: int) -> list[int]:
    """Return `count` exponential lengths in tokens, at least 1 each."""
    drawn: list[int] = (
        np.maximum(1, np.rint(draw.standard_exponential(count) * mean)).astype(np.int64).tolist()
    )
    return drawn
