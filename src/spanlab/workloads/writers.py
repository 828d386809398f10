"""Output formats of workloads: block hashes, load generators, bodies of requests, and sessions of
calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from spanlab.core.request import Request
from spanlab.core.token_string import TokenKey
from spanlab.registry import Registry, positive
from spanlab.workloads.logs.formats import BLOCKS
from spanlab.workloads.logs.trajectories import SCHEMA, VERSION
from spanlab.workloads.text import find_tokenizer
from spanlab.workloads.workload import PROMPTS, check_prompts

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# ------------------------------------------------------------------------------
# Registry of output formats of workloads; each format is registered by its module.
# ------------------------------------------------------------------------------

Line = dict[str, Any]
#: Converts requests in order of arrival to one JSON object each, in which numpy arrays are lists.
Writer = Callable[[Iterable[Request]], Iterator[Line]]

#: A registered function returns the writer; its parameters are keys of `writer`.
WRITERS: Registry[Writer] = Registry("writer")
#: Formats without tokens: equal numbers mean equal blocks, and say nothing about their content.
HASHED = ("aiperf", "dynamo", "guidellm", "mooncake", "weka")
BlockSize = Annotated[int, positive, "tokens per block"]


# ------------------------------------------------------------------------------
# Traces of prompts as chained block ids: an id identifies the tokens of a block and its whole
# prefix.
# ------------------------------------------------------------------------------


class BlockIds:
    """Block numbers in order of first appearance; equal numbers mean equal prompts up to the
    block's end.

    A partial last block has a separate number, so that a number always stands for the same number
    of tokens.
    """

    def __init__(self, size: int) -> None:
        if size not in BLOCKS:
            sizes = ", ".join(map(str, sorted(BLOCKS)))
            raise ValueError(
                f"writer.block_size={size}: expected one of {sizes}, the sizes that log readers recognise"
            )
        self._size = size
        self._numbers: dict[tuple[int, TokenKey], int] = {}
        self._salts: dict[str, int] = {}

    def of(self, request: Request) -> list[int]:
        """Return the block numbers of a prompt; requests with different salts share no blocks."""
        tokens, numbers = request.string, []
        parent = -1 - self._salts.setdefault(request.cache_salt, len(self._salts))
        for start in range(0, len(tokens), self._size):
            block = parent, tokens.key(start, self._size)
            parent = self._numbers.setdefault(block, len(self._numbers))
            numbers.append(parent)
        return numbers

    def fresh(self, tokens: int) -> list[int]:
        """Return numbers of the blocks of tokens that no other prompt has."""
        first = len(self._numbers)
        for number in range(first, first - (-tokens // self._size)):
            self._numbers[number, b"fresh"] = number
        return [*range(first, len(self._numbers))]


def block_trace(block_size: int, timestamp: Callable[[Request], float]) -> Writer:
    """Return a writer of Mooncake's fields; `timestamp` returns the arrival in the trace's unit of
    time."""
    ids = BlockIds(block_size)

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            yield {
                "timestamp": timestamp(request),
                "input_length": request.num_tokens,
                "output_length": request.output_len,
                "hash_ids": ids.of(request),
            }

    return write


# ------------------------------------------------------------------------------
# Bodies of calls to an OpenAI-compatible server, with outputs of an exact length.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bodies:
    """Writer of request bodies for a model of a server.

    `tokenizer`  decodes prompts to text; None if and only if prompts are token ids
    `exact`      requests outputs of an exact length, with parameters that vLLM and SGLang add to
                 OpenAI's
    """

    model: str | None
    prompts: str
    tokenizer: Tokenizer | None = None
    exact: bool = True

    @property
    def call(self) -> str:
        """The API call of the bodies: the path after /v1/."""
        return "chat/completions" if self.prompts == "messages" else "completions"

    def body(self, request: Request) -> dict[str, Any]:
        """Return prompt and output limits, for `orjson.OPT_SERIALIZE_NUMPY`; `cache_salt` is a
        parameter of vLLM."""
        if self.tokenizer is None:
            prompt: dict[str, Any] = {"prompt": request.tokens}
        else:
            text = self.tokenizer.decode(request.tokens.tolist(), skip_special_tokens=False)
            prompt = (
                {"messages": [{"role": "user", "content": text}]}
                if self.prompts == "messages"
                else {"prompt": text}
            )
        body = {**prompt, "max_tokens": request.output_len, "temperature": 0.0}
        if self.exact:
            body |= {"min_tokens": request.output_len, "ignore_eos": True}
        if self.model is not None:
            body["model"] = self.model
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        return body


# ------------------------------------------------------------------------------
# A trace for guidellm's replay profile: kind=mooncake reads its blocks, kind=trace_synthetic
# only its lengths.
# ------------------------------------------------------------------------------


@WRITERS.register("guidellm")
def guidellm(block_size: BlockSize = 512) -> Writer:
    """Write a Mooncake trace with `timestamp` in seconds, as guidellm reads it."""
    return block_trace(block_size, lambda request: request.arrived_at / 1e9)


# ------------------------------------------------------------------------------
# Mooncake trace, which AIPerf, Dynamo and SGLang replay as a timed trace: milliseconds,
# lengths, block ids.
# ------------------------------------------------------------------------------

_NS_PER_MS = 1_000_000


@WRITERS.register("mooncake")
def mooncake(block_size: BlockSize = 512) -> Writer:
    """Write `timestamp` in milliseconds, as an integer if exact, and no sessions, because readers
    continue them."""
    return block_trace(block_size, lambda request: _milliseconds(request.arrived_at))


def _milliseconds(nanoseconds: int) -> float:
    milliseconds, remainder = divmod(nanoseconds, _NS_PER_MS)
    return nanoseconds / _NS_PER_MS if remainder else milliseconds


# ------------------------------------------------------------------------------
# Requests to an OpenAI-compatible server as lines of a batch file, with their times.
# ------------------------------------------------------------------------------


@WRITERS.register("openai")
def openai(
    served_model: Annotated[str | None, "name of the model in each request"] = None,
    prompts: Annotated[
        str, PROMPTS, "tokens: ids; text; messages: one message of a user"
    ] = "tokens",
    tokenizer: Annotated[
        str | None, "decodes prompts: tokenizer.json, its folder, or a hub name"
    ] = None,
) -> Writer:
    """Write the call as `body`, with `timestamp` in seconds, `session_id` and `output_length` as
    further fields."""
    check_prompts("writer", prompts, tokenizer)
    bodies = Bodies(
        served_model, prompts, None if tokenizer is None else find_tokenizer(tokenizer).tokenizer
    )

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            yield {
                "custom_id": f"request-{request.id}",
                "method": "POST",
                "url": f"/v1/{bodies.call}",
                "body": bodies.body(request),
                "timestamp": request.arrived_at / 1e9,
                "session_id": request.group_id,
                "output_length": request.output_len,
            }

    return write


# ------------------------------------------------------------------------------
# Sessions of calls as traces of other tools: AIPerf, GuideLLM (WEKA) and Dynamo (agentic Mooncake).
# Calls of a tree wait for others, as `arrivals=sessions` says. Each tool expresses a part of that;
# what it does not is counted.
# ------------------------------------------------------------------------------

LONGER = "calls whose prompt is longer there, for each turn has its answer and a new token behind the turn before it"
APART = "calls that go on with another beginning: each begins a session of its own, at its earliest time"
UNORDERED = "waits for calls of other sessions: the tool does not keep them"


# ------------------------------------------------------------------------------
# Sessions of a tree: lines of calls, each of which goes on from the one before it.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """The calls of one tree in an order in which each follows those that it waits for.

    `before`    the call of the same session before each call, by id; first calls of sessions are
                not in it
    `sessions`  number of the session of each call in its tree, by id
    `earliest`  nanoseconds at which each call would arrive if calls took no time, by id
    """

    calls: list[Request]
    before: Mapping[int, Request]
    sessions: Mapping[int, int]
    earliest: Mapping[int, int]

    @property
    def number(self) -> int:
        """The number of the group."""
        return self.calls[0].group_id


def trees_of(requests: Iterable[Request]) -> list[Tree]:
    """Return the trees of requests, by their start.

    A call goes on from the one that it alone waits for, if that one is awaited by it alone, or else
    from the one with the longest common beginning; each call has at most one that goes on from it.
    """
    groups: dict[int, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    trees = []
    for group in groups.values():
        by_id = {request.id: request for request in group}
        order = TopologicalSorter({request.id: request.after for request in group}).static_order()
        awaited = Counter(number for request in group for number in request.after)
        before: dict[int, Request] = {}
        continued: set[int] = set()
        sessions: dict[int, int] = {}
        earliest: dict[int, int] = {}
        calls = [by_id[number] for number in order]
        for call in calls:
            earliest[call.id] = max(
                [call.arrived_at, *(earliest[number] + call.wait_ns for number in call.after)]
            )
            previous = _previous(call, by_id, awaited, continued)
            if previous is None:
                sessions[call.id] = len(set(sessions.values()))
            else:
                before[call.id] = previous
                continued.add(previous.id)
                sessions[call.id] = sessions[previous.id]
        trees.append(
            Tree(sorted(calls, key=lambda call: earliest[call.id]), before, sessions, earliest)
        )
    return trees


def _previous(
    call: Request, by_id: Mapping[int, Request], awaited: Mapping[int, int], continued: set[int]
) -> Request | None:
    """Return the call that a call goes on from; None if it begins a session."""
    free = [by_id[number] for number in call.after if number not in continued]
    if not free:
        return None
    if len(call.after) == 1 and awaited[free[0].id] == 1:
        return free[0]
    shared = [_common(call, other) for other in free]
    longest = int(np.argmax(shared))
    return free[longest] if shared[longest] else None


def _common(first: Request, second: Request) -> int:
    """Return the length of the common beginning of two prompts."""
    length = min(first.num_tokens, second.num_tokens)
    if first.cache_salt != second.cache_salt:
        return 0
    differs = np.flatnonzero(first.tokens[:length] != second.tokens[:length])
    return int(differs[0]) if len(differs) else length


@dataclass
class SessionWriter:
    """A writer of sessions; `counts` says after writing how often the tool's format could not
    express something."""

    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, requests: Iterable[Request]) -> Iterator[Line]:
        """Yield one object per line of the file."""
        self.counts.clear()
        yield from self.lines(trees_of(requests))

    def lines(self, trees: Sequence[Tree]) -> Iterator[Line]:
        """Yield the lines of all trees."""
        raise NotImplementedError  # every tool has its own

    def count_waits(self, tree: Tree) -> None:
        """Count the waits for calls of other sessions."""
        for call in tree.calls:
            previous = tree.before.get(call.id)
            self.counts[UNORDERED] += sum(
                previous is None or number != previous.id for number in call.after
            )

    def notes(self) -> list[str]:
        """Return what the format could not express, one sentence each."""
        return [
            f"not expressed: {number:,} {what}" for what, number in self.counts.items() if number
        ]


# ------------------------------------------------------------------------------
# Dynamo: agentic Mooncake in its second version, with all waits of a tree.
# ------------------------------------------------------------------------------


@dataclass
class Dynamo(SessionWriter):
    """Writes a header, and a row per call with those that it waits for; ids of blocks hold within a
    tree."""

    block_size: int = 512
    model: str = "model"

    def lines(self, trees: Sequence[Tree]) -> Iterator[Line]:
        """Yield the header and the rows."""
        digest = sha256(
            repr([[call.id for call in tree.calls] for tree in trees]).encode()
        ).hexdigest()
        yield {
            "schema": SCHEMA,
            "version": VERSION,
            "block_size": self.block_size,
            "hash_id_scope": "local",
            "source": {"format": "spanlab", "digest": digest},
        }
        first_blocks: Counter[Any] = Counter()
        for tree in trees:
            ids = BlockIds(self.block_size)
            first_blocks.update(
                {(call.cache_salt, call.tokens[: self.block_size].tobytes()) for call in tree.calls}
            )
            for call in tree.calls:
                yield self._row(tree, call, ids)
        self.counts[SHARED] = sum(number - 1 for number in first_blocks.values())

    def _row(self, tree: Tree, call: Request, ids: BlockIds) -> Line:
        session = f"{tree.number}.{tree.sessions[call.id]}"
        previous = tree.before.get(call.id)
        return {
            "request_id": f"r{call.id}",
            "play_id": f"p{tree.number}",
            "session_id": f"s{session}",
            "model": self.model,
            "input_length": call.num_tokens,
            "output_length": call.output_len,
            "hash_ids": ids.of(call),
            "not_before_ms": _milliseconds(call.arrived_at),
            "dependencies": [
                {
                    "request_id": f"r{number}",
                    "trigger": "completion",
                    "delay_ms": _milliseconds(call.wait_ns),
                    "relation": "spawn"
                    if previous is None
                    else ("sequence" if number == previous.id else "join"),
                }
                for number in call.after
            ],
        }


SHARED = "beginnings that several trees share: ids of blocks hold within a tree"


@WRITERS.register("dynamo")
def dynamo(block_size: BlockSize = 512, served_model: str | None = None) -> Dynamo:
    """Write agentic Mooncake, version 2: each call with those that it waits for, and the times of
    tools."""
    BlockIds(block_size)  # refuses other sizes
    return Dynamo(block_size=block_size, model=served_model or "model")


# ------------------------------------------------------------------------------
# AIPerf: a Mooncake trace with sessions, whose later rows are the new tokens of a turn.
# ------------------------------------------------------------------------------


@dataclass
class Aiperf(SessionWriter):
    """Writes the first row of a session with its time, and later ones with their delay and their
    new tokens."""

    block_size: int = 512

    def lines(self, trees: Sequence[Tree]) -> Iterator[Line]:
        """Yield the rows by the time of their tree; ids of blocks hold in the whole file."""
        ids = BlockIds(self.block_size)
        for tree in trees:
            self.count_waits(tree)
            names: dict[int, str] = {}
            lengths: dict[int, int] = {}
            for call in tree.calls:
                previous = tree.before.get(call.id)
                if previous is not None and _common(call, previous) < previous.num_tokens:
                    self.counts[APART] += 1
                    previous = None
                names[call.id] = (
                    f"s{tree.number}.{call.id}" if previous is None else names[previous.id]
                )
                yield self._row(tree, call, previous, names[call.id], ids, lengths)

    def _row(
        self,
        tree: Tree,
        call: Request,
        previous: Request | None,
        session: str,
        ids: BlockIds,
        lengths: dict[int, int],
    ) -> Line:
        row: Line = {"session_id": session}
        if previous is None:
            lengths[call.id] = call.num_tokens
            row |= {
                "timestamp": _milliseconds(tree.earliest[call.id]),
                "input_length": call.num_tokens,
            }
            return row | {"output_length": call.output_len, "hash_ids": ids.of(call)}
        before = lengths[previous.id] + previous.output_len
        new = max(1, call.num_tokens - before)
        lengths[call.id] = before + new
        self.counts[LONGER] += lengths[call.id] > call.num_tokens
        row |= {
            "delay": _milliseconds(call.wait_ns),
            "input_length": new,
            "output_length": call.output_len,
        }
        return row | {"hash_ids": ids.fresh(new)}


@WRITERS.register("aiperf")
def aiperf(block_size: BlockSize = 512) -> Aiperf:
    """Write a Mooncake trace with sessions: later rows are the new tokens of a turn, behind the
    answer before it."""
    BlockIds(block_size)
    return Aiperf(block_size=block_size)


# ------------------------------------------------------------------------------
# GuideLLM: the trace format of WEKA, with one object per conversation.
# ------------------------------------------------------------------------------

PARALLEL = "waits for other calls than the one before: calls of a conversation follow each other"
_NS_PER_S = 1e9


@dataclass
class Weka(SessionWriter):
    """Writes one object per tree with its calls in the order of their earliest time; times are of
    that order."""

    block_size: int = 64

    def lines(self, trees: Sequence[Tree]) -> Iterator[Line]:
        """Yield one object per tree."""
        first_blocks: Counter[Any] = Counter()
        for tree in trees:
            ids, start = BlockIds(self.block_size), tree.earliest[tree.calls[0].id]
            first_blocks.update(
                {(call.cache_salt, call.tokens[: self.block_size].tobytes()) for call in tree.calls}
            )
            requests = []
            for number, call in enumerate(tree.calls):
                in_line = [tree.calls[number - 1].id] if number else []
                self.counts[PARALLEL] += sorted(call.after) != in_line
                requests.append(
                    {
                        "t": (tree.earliest[call.id] - start) / _NS_PER_S,
                        "type": "n",
                        "in": call.num_tokens,
                        "out": call.output_len,
                        "hash_ids": [
                            block + 1
                            for block in ids.of(call)[: call.num_tokens // self.block_size]
                        ],
                        "think_time": call.wait_ns / _NS_PER_S,
                    }
                )
            yield {
                "id": f"s{tree.number}",
                "block_size": self.block_size,
                "hash_id_scope": "local",
                "requests": requests,
            }
        self.counts[SHARED] = sum(number - 1 for number in first_blocks.values())


@WRITERS.register("weka")
def weka(block_size: BlockSize = 64) -> Weka:
    """Write WEKA's trace of conversations, which GuideLLM reads: one object each, ids of full
    blocks."""
    BlockIds(block_size)
    return Weka(block_size=block_size)


#: Formats that hold sessions of calls.
SESSIONS = ("aiperf", "dynamo", "weka")
