"""A running server under test: its greedy answers, cached and uncached, and trials that compare
them."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from spanlab.registry import not_negative, one_of, positive, within
from spanlab.settings.server import ServerSettings
from spanlab.study.real_server import Endpoint, FailedRequestError, reset
from spanlab.study.verdicts import Choice, Difference, Measurement, difference, not_applicable
from spanlab.typed_json import from_json

# ------------------------------------------------------------------------------
# Settings of the test of a running server.
# ------------------------------------------------------------------------------

SALT, RESET = "salt", "reset"
_MOST_AT_ONCE = 1024


@dataclass
class LiveSettings:
    """How a running server is tested; with base_url only.

    `reference`      how a prompt is answered without a cache: salt: under a new cache_salt; reset:
                     after a call of server.reset_path; auto: salt where the server separates salts,
                     else reset
    `block_size`     tokens of a cache block; null: as the cached tokens of repeated prompts show
    `largest_prompt`  most tokens of a prompt
    `concurrency`    requests that are sent at once
    `repeats`        uncached answers to each prompt from which the noise is measured
    `top`            log-probabilities of each generated token
    `rounding`       largest difference of log-probabilities that rounding can explain
    `chunk_tokens`   most prompt tokens that the server computes in a step; null: unknown, chunks
                     are not tested
    `fill_tokens`    most tokens of other prompts that are sent to evict a prompt
    `long_output`    most output tokens of a request that is to be preempted
    `drafts`         whether the server drafts tokens; null: as its metrics show
    `shrink`         most attempts to find a smaller prompt that fails
    `seed`           seed of the prompts
    """

    reference: str = "auto"
    block_size: int | None = None
    largest_prompt: int = 2048
    concurrency: int = 8
    repeats: int = 3
    top: int = 5
    rounding: float = 0.5
    chunk_tokens: int | None = None
    fill_tokens: int = 65_536
    long_output: int = 512
    drafts: bool | None = None
    shrink: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("live.reference", self.reference, ("auto", "salt", "reset"))
        for key in (
            "block_size",
            "largest_prompt",
            "rounding",
            "chunk_tokens",
            "fill_tokens",
            "long_output",
            "top",
        ):
            positive(f"live.{key}", getattr(self, key))
        within(2, _MOST_AT_ONCE)("live.concurrency", self.concurrency)
        within(2, 100)("live.repeats", self.repeats)
        for key in ("shrink", "seed"):
            not_negative(f"live.{key}", getattr(self, key))

    def check(self, server: ServerSettings, output_tokens: int) -> None:
        """Raise ValueError for a reset without its path, and for prompts that no output fits
        behind."""
        if self.reference == RESET and server.reset_path is None:
            raise ValueError(
                "live.reference=reset with server.reset_path=null: expected the path that empties the cache"
            )
        if self.largest_prompt <= output_tokens + 2:
            expected = f"expected more than output_tokens={output_tokens} and two tokens"
            raise ValueError(f"live.largest_prompt={self.largest_prompt}: {expected}")


class ServerGoneError(ValueError):
    """The server no longer answers; the message is a sentence."""


class CachedReferenceError(Exception):
    """An answer that was to be uncached reused tokens; the message says how many."""


# ------------------------------------------------------------------------------
# Replies of /v1/completions: log-probabilities as in OpenAI's completions, or as in its chats.
# ------------------------------------------------------------------------------


@dataclass
class _Lists:
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


@dataclass
class _Candidate:
    token: str
    logprob: float


@dataclass
class _Generated(_Candidate):
    top_logprobs: list[_Candidate] = field(default_factory=list)


@dataclass
class _Contents:
    content: list[_Generated]


@dataclass
class _ReplyChoice:
    logprobs: _Lists | _Contents | None = None


@dataclass
class _Details:
    cached_tokens: int | None = None


@dataclass
class _Usage:
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


@dataclass
class _Reply:
    choices: list[_ReplyChoice]
    usage: _Usage


_TOKEN_ID = re.compile(r"token_id:(\d+)")


@dataclass(frozen=True)
class LiveAnswer:
    """A greedy answer: its tokens with log-probabilities, and the prompt tokens that were
    reused."""

    choices: tuple[Choice, ...]
    cached: int

    @property
    def tokens(self) -> list[int] | None:
        """Token ids; None if the server reports texts only."""
        ids = [_TOKEN_ID.fullmatch(choice.token) for choice in self.choices]
        return [int(match[1]) for match in ids if match] if all(ids) else None


def _answer(reply: bytes, count: int, exact: bool) -> LiveAnswer:
    """Read a reply of at most `count` tokens; FailedRequestError with one sentence where a part is
    missing."""
    try:
        read = from_json(reply, _Reply, unknown="ignore")
    except ValueError as error:
        raise FailedRequestError(f"the reply is no completion: {error}") from error
    logprobs = read.choices[0].logprobs if read.choices else None
    if logprobs is None:
        raise FailedRequestError("the reply has no log-probabilities")
    details = read.usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else None
    if isinstance(logprobs, _Contents):
        choices = [
            Choice(
                each.token,
                {top.token: top.logprob for top in each.top_logprobs} | {each.token: each.logprob},
            )
            for each in logprobs.content
        ]
    else:
        tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
        choices = [
            Choice(token, (top or {}) | ({} if value is None else {token: value}))
            for token, value, top in zip(
                logprobs.tokens, logprobs.token_logprobs, tops, strict=False
            )
            if top or value is not None
        ]
    if not choices or (exact and len(choices) != count):
        raise FailedRequestError(
            f"the reply has log-probabilities of {len(choices)} tokens, expected {count}"
        )
    return LiveAnswer(tuple(choices), cached or 0)


# ------------------------------------------------------------------------------
# Calls of the server: prompts of token ids under salts, or after the cache was emptied.
# ------------------------------------------------------------------------------


#: A line of Prometheus' text format, and labels of vLLM.
_SAMPLE = re.compile(
    r"^([A-Za-z_:][\w:]*)(\{.*\})? ([-+.\deE]+|NaN|[+-]Inf)(?: \d+)?$", re.MULTILINE
)
_LABEL = re.compile(r'\b(num_gpu_blocks|block_size)="(\d+)"')


@dataclass
class LiveServer:
    """A running server; every call of a trial is stored, so that others can send it again.

    `reference`   salt or reset
    `block`       tokens of a cache block
    `sent`        bodies since the last call of `begin`; those of one list were sent at once
    `run`         random number of this run, for salts and prompts that no earlier run had
    """

    endpoint: Endpoint
    model: str
    server: ServerSettings
    settings: LiveSettings
    vocab_size: int
    output: int
    reference: str = SALT
    block: int = 1
    calls: int = 0
    sent: list[list[dict[str, Any]]] = field(default_factory=list)
    _salts: int = 0
    run: int = field(default_factory=lambda: secrets.randbits(48))

    def tokens(self, stream: int, count: int) -> list[int]:
        """Random token ids; a longer prompt of the same stream starts with a shorter one."""
        draw = np.random.default_rng([self.settings.seed, stream])
        return [int(token) for token in draw.integers(0, self.vocab_size, count)]

    def begin(self) -> None:
        """Forget the calls of earlier trials."""
        self.sent.clear()

    async def fresh(self) -> str:
        """Return a new salt, or empty the cache and return no salt."""
        if self.reference == RESET:
            await reset(self.endpoint, str(self.server.reset_path))
            self.sent.append([{"POST": self.server.reset_path}])
            return ""
        return self.new_salt()

    def new_salt(self) -> str:
        """Return a salt that no earlier request had."""
        self._salts += 1
        return f"spanlab-{self.run}-{self._salts}"

    async def answer(
        self, prompt: Sequence[int], salt: str, tokens: int | None = None
    ) -> LiveAnswer:
        """Answer one prompt; `tokens` is the length of the output."""
        return (await self.together([prompt], salt, tokens))[0]

    async def together(
        self,
        prompts: Sequence[Sequence[int]],
        salts: str | Sequence[str],
        tokens: int | None = None,
    ) -> list[LiveAnswer]:
        """Send prompts at once, and return their answers in order."""
        each = [salts] * len(prompts) if isinstance(salts, str) else salts
        bodies = [
            self.body(prompt, salt, tokens) for prompt, salt in zip(prompts, each, strict=True)
        ]
        self.sent.append(bodies)
        self.calls += len(bodies)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._send(body)) for body in bodies]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in running]

    async def _send(self, body: dict[str, Any]) -> LiveAnswer:
        reply = await self.endpoint.complete("completions", orjson.dumps(body))
        return _answer(reply, body["max_tokens"], self.server.exact_lengths)

    async def uncached(self, prompt: Sequence[int], tokens: int | None = None) -> LiveAnswer:
        """Answer a prompt without a cache; CachedReferenceError where tokens were reused
        nevertheless."""
        answer = await self.answer(prompt, await self.fresh(), tokens)
        if answer.cached:
            how = (
                "under a new cache_salt"
                if self.reference == SALT
                else f"after {self.server.reset_path}"
            )
            raise CachedReferenceError(f"{answer.cached:,} tokens were reused {how}")
        return answer

    def body(self, prompt: Sequence[int], salt: str, tokens: int | None = None) -> dict[str, Any]:
        """Body of a call of /completions."""
        count = self.output if tokens is None else tokens
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": count}
        body |= {"temperature": 0.0, "seed": 0, "logprobs": self.settings.top}
        if self.server.exact_lengths:
            body |= {"min_tokens": count, "ignore_eos": True, "return_tokens_as_token_ids": True}
        return body | ({"cache_salt": salt} if salt else {})

    async def metrics(self) -> dict[str, float]:
        """Sums of the server's metrics by name, and block_size and num_gpu_blocks of vLLM; empty
        where it has none."""
        try:
            text = (await self.endpoint.get("/metrics")).decode(errors="replace")
        except FailedRequestError:
            return {}
        sums: dict[str, float] = {}
        for name, labels, value in _SAMPLE.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
            if name == "vllm:cache_config_info":
                for label, number in _LABEL.findall(labels):
                    sums[label] = sums.get(label, 0.0) * (label == "num_gpu_blocks") + float(number)
        return sums


# ------------------------------------------------------------------------------
# Trials: prompts of which a cached and an uncached answer are compared, and the smallest one
# that fails.
# ------------------------------------------------------------------------------

SUFFIX = 5  # tokens behind a prefix: less than a block of any server but those of single tokens


@dataclass(frozen=True)
class Shape:
    """Sizes of a prompt: tokens that earlier requests had, and further ones."""

    prefix: int
    suffix: int = SUFFIX


@dataclass(frozen=True)
class Compared:
    """An answer that was compared with an uncached one.

    `occurred`  whether the tested effect occurred; None: whether tokens were reused
    """

    shape: Shape
    prompt: Sequence[int]
    answer: LiveAnswer
    reference: Sequence[Choice]
    occurred: bool | None = None

    @property
    def difference(self) -> Difference:
        """Difference to the reference."""
        return difference(self.answer.choices, self.reference)

    @property
    def effective(self) -> bool:
        """Whether the tested effect occurred."""
        return self.answer.cached > 0 if self.occurred is None else self.occurred


Trial = Callable[[Shape], Awaitable[list[Compared]]]


@dataclass(frozen=True)
class LiveTest:
    """Settings of the test of a running server."""

    server: ServerSettings
    settings: LiveSettings
    prompts: int
    output: int
    vocab_size: int


@dataclass
class LiveSubject:
    """The server under test.

    `limit`   largest difference of log-probabilities that noise explains
    `folder`  folder of the run
    `name`    the property that is tested
    """

    test: LiveTest
    server: LiveServer
    folder: Path
    limit: float = 0.0
    name: str = ""

    @property
    def longest(self) -> int:
        """Most tokens of a prompt."""
        return self.test.settings.largest_prompt

    @property
    def ends(self) -> list[int]:
        """Block boundaries at which prefixes are tested."""
        block = self.server.block
        return [
            block * k
            for k in range(1, self.test.prompts + 1)
            if block * k + 1 + SUFFIX <= self.longest
        ]

    def around(self, suffix: int = SUFFIX) -> list[Shape]:
        """Prefixes that end before, at and after each boundary."""
        ends = {end + shift for end in self.ends for shift in (-1, 0, 1)}
        return [Shape(prefix, suffix) for prefix in sorted(ends) if prefix > 0]

    async def check(
        self, trial: Trial, shapes: Sequence[Shape], effect: str = "reused tokens"
    ) -> Measurement:
        """Compare the answers of all trials; the smallest failing prompt is written to the run
        folder."""
        compared: list[Compared] = []
        worst, calls = None, self.server.sent
        for shape in shapes:
            self.server.begin()
            compared += (answers := await trial(shape))
            largest = _worst(answers)
            if largest is not None and (
                worst is None or largest.difference.value > worst.difference.value
            ):
                worst, calls = largest, list(self.server.sent)
        if worst is None:
            return not_applicable(
                f"no prompt of two blocks fits in live.largest_prompt={self.longest}"
            )
        effective = sum(each.effective for each in compared)
        forks = sum(each.difference.fork is not None for each in compared)
        what = (
            f"log-probabilities to uncached answers; {effective} of {len(compared)} {effect}, "
            f"{forks} have other tokens"
        )
        if worst.difference.value > self.limit:
            worst, calls = await self._shrink(trial, worst, calls)
            return self._failure(worst, calls, what)
        return Measurement(worst.difference.value if effective else None, self.limit, what)

    async def _shrink(
        self, trial: Trial, worst: Compared, calls: list[list[dict[str, Any]]]
    ) -> tuple[Compared, list[list[dict[str, Any]]]]:
        """Try smaller prompts that may fail too: fewer blocks before, then fewer tokens behind."""
        attempts = self.test.settings.shrink
        for sizes in (_fewer_blocks, _shorter):
            for shape in sizes(worst.shape, self.server.block):
                if attempts == 0:
                    break
                attempts -= 1
                self.server.begin()
                try:
                    smaller = _worst(await trial(shape))
                except (FailedRequestError, CachedReferenceError):
                    break
                if smaller is not None and smaller.difference.value > self.limit:
                    worst, calls = smaller, list(self.server.sent)
                    break
        return worst, calls

    def _failure(
        self, worst: Compared, calls: list[list[dict[str, Any]]], what: str
    ) -> Measurement:
        """Write all calls of a failing trial with both answers, for a maintainer of the server."""
        file = self.folder / "failing" / f"{self.name}.json"
        differs = worst.difference
        example: dict[str, object] = {
            "file": str(file.relative_to(self.folder)),
            "prompt_tokens": len(worst.prompt),
            "cached_tokens": worst.answer.cached,
            "position": differs.position,
            "difference": differs.value,
            "first_other": differs.fork,
            "tokens": differs.tokens,
            "gaps": differs.gaps,
        }
        contents = example | {
            "property": self.name,
            "limit": self.limit,
            "prompt": worst.prompt,
            "calls": calls,
            "answer": worst.answer.choices,
            "reference": worst.reference,
        }
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(orjson.dumps(contents, option=orjson.OPT_INDENT_2))
        where = f"output token {differs.position}"
        if differs.fork == differs.position:
            where += f" is {differs.tokens[0]} instead of {differs.tokens[1]}"
        smallest = f"{len(worst.prompt):,} tokens, {worst.answer.cached:,} cached, {where}"
        return Measurement(
            differs.value,
            self.limit,
            f"{what}; smallest failing prompt: {smallest}",
            example=example,
        )


def _worst(compared: Sequence[Compared]) -> Compared | None:
    return max(compared, key=lambda each: each.difference.value, default=None)


def _fewer_blocks(shape: Shape, block: int) -> Iterator[Shape]:
    """Prefixes that end at the same offset from a boundary, the shortest first."""
    # from -1, so that a prefix before its boundary stays there
    offset = (shape.prefix + 1) % block - 1
    count = (shape.prefix - offset) // block
    blocks = 1
    while blocks < count:
        if (prefix := blocks * block + offset) > 0:
            yield replace(shape, prefix=prefix)
        blocks *= 2


def _shorter(shape: Shape, block: int) -> Iterator[Shape]:
    suffix = 1
    while suffix < shape.suffix:
        yield replace(shape, suffix=suffix)
        suffix *= 2
