"""Conformance of a running server: its cached answers against its own uncached ones, property by
property."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from spanlab.judge import api_key
from spanlab.registry import Registry
from spanlab.study.folder import print_line
from spanlab.study.live_server import (
    RESET,
    SALT,
    SUFFIX,
    CachedReferenceError,
    Compared,
    LiveAnswer,
    LiveServer,
    LiveSubject,
    LiveTest,
    ServerGoneError,
    Shape,
)
from spanlab.study.real_server import Endpoint, FailedRequestError, Patience, only_model
from spanlab.study.verdicts import (
    FAILED,
    Choice,
    Measurement,
    Measurements,
    difference,
    logit_step,
    not_applicable,
)

#: Functions of a running server that return a measurement.
LIVE: Registry[Awaitable[Measurement]] = Registry("properties", given=("subject",))

NOISE = "noise"
LEAST_LIMIT = 1e-3  # of log-probabilities; float32 kernels of other shapes differ by less
MARGIN = 3  # limit ÷ noise: the largest of few differences is below the largest of many


# ------------------------------------------------------------------------------
# Noise: differences among uncached answers to one prompt, alone, beside other requests, and
# continued after a part of the answer.
# ------------------------------------------------------------------------------


async def noise(subject: LiveSubject) -> Measurement:
    """Uncached answers to one prompt differ by no more than rounding explains; sets the limit of
    the properties."""
    server = subject.server
    largest = {"repeated": 0.0, "in a batch": 0.0, "after a part of the answer": 0.0}
    lengths = [end + 3 for end in subject.ends] or [subject.longest // 2]
    answers = list[LiveAnswer]()
    for number, length in enumerate(lengths):
        prompt = server.tokens(1 + number, length)
        first = await server.uncached(prompt)
        others = [await server.uncached(prompt) for _ in range(subject.test.settings.repeats - 1)]
        largest["repeated"] = max(
            largest["repeated"], *(_difference(first, other) for other in others)
        )
        beside = await _in_batch(subject, prompt, 100 + number)
        largest["in a batch"] = max(largest["in a batch"], _difference(first, beside))
        if (tokens := first.tokens) and (middle := len(tokens) // 2):
            rest = await server.uncached(prompt + tokens[:middle], len(tokens) - middle)
            value = difference(rest.choices, first.choices[middle:]).value
            largest["after a part of the answer"] = max(
                largest["after a part of the answer"], value
            )
        answers += [first, beside]
    step = logit_step(answer.choices for answer in answers)
    rounding = subject.test.settings.rounding
    noises = ", ".join(f"{value:.2g} {how}" for how, value in largest.items())
    steps = f"; logits in steps of {step:.3g}" if step else ""
    subject.limit = min(rounding, max(LEAST_LIMIT, MARGIN * max(largest.values()), 2 * step))
    return Measurement(
        max(largest.values()),
        rounding,
        f"log-probabilities among uncached answers; {noises}{steps}",
    )


def _difference(answer: LiveAnswer, other: LiveAnswer) -> float:
    return difference(answer.choices, other.choices).value


async def _in_batch(subject: LiveSubject, prompt: Sequence[int], stream: int) -> LiveAnswer:
    """Answer a prompt without a cache while the server answers others."""
    server, count = subject.server, subject.test.settings.concurrency
    lengths = [min(subject.longest, len(prompt) + 7 * number) for number in range(1, count)]
    others = [
        server.tokens(1000 * stream + number, length) for number, length in enumerate(lengths)
    ]
    salt = await server.fresh()
    salts = [
        salt,
        *(
            [salt] * len(others)
            if server.reference == RESET
            else [await server.fresh() for _ in others]
        ),
    ]
    answers = await server.together([prompt, *others], salts)
    if answers[0].cached:
        raise CachedReferenceError(f"{answers[0].cached:,} tokens of a new prompt were reused")
    return answers[0]


# ------------------------------------------------------------------------------
# Properties of one prompt after another: prefixes, whole prompts, turns and tenants.
# ------------------------------------------------------------------------------


@LIVE.register("salt_isolation")
async def salt_isolation(subject: LiveSubject) -> Measurement:
    """A prompt reuses tokens under its own cache_salt, and none under another or without one."""
    server = subject.server
    if subject.test.settings.reference == RESET:
        return not_applicable("live.reference=reset: requests have no cache_salt")
    # new in each run, for a cache may outlive a run
    prompt = server.tokens(server.run, subject.longest // 2)
    salts = [server.new_salt() for _ in range(3)]
    await server.answer(prompt, salts[0], 1)
    others = [(await server.answer(prompt, salt, 1)).cached for salt in (salts[1], "", salts[2])]
    same = (await server.answer(prompt, salts[0], 1)).cached
    what = f"tokens reused of another cache_salt; {same:,} under the same, of {len(prompt):,}"
    return Measurement(float(max(others)) if same else None, 0.0, what)


@LIVE.register("prefix_boundaries")
async def prefix_boundaries(subject: LiveSubject) -> Measurement:
    """Answers after a cached prefix equal uncached ones, wherever the prefix ends around a block
    boundary."""

    async def trial(shape: Shape) -> list[Compared]:
        server, prefix = subject.server, subject.server.tokens(2000, shape.prefix)
        prompt = prefix + server.tokens(2001, shape.suffix)
        answers = []
        # a prompt that forks, and one that goes on
        for before in (prefix + server.tokens(2002, SUFFIX), prefix):
            salt = await server.fresh()
            await server.answer(before, salt, 1)
            answers.append(await server.answer(prompt, salt))
        reference = await server.uncached(prompt)
        return [Compared(shape, prompt, answer, reference.choices) for answer in answers]

    return await subject.check(trial, subject.around())


@LIVE.register("full_hit")
async def full_hit(subject: LiveSubject) -> Measurement:
    """The same prompt again, and once more, is answered as the first time."""

    async def trial(shape: Shape) -> list[Compared]:
        server, prompt = subject.server, subject.server.tokens(3000, shape.prefix)
        reference = await server.uncached(prompt)
        salt = await server.fresh()
        await server.answer(prompt, salt)
        answers = [await server.answer(prompt, salt) for _ in range(2)]
        return [Compared(shape, prompt, answer, reference.choices) for answer in answers]

    return await subject.check(trial, subject.around(suffix=0))


@LIVE.register("turns")
async def turns(subject: LiveSubject) -> Measurement:
    """A prompt that goes on after the server's own answer reuses what decoding stored, and is
    answered as uncached."""

    async def trial(shape: Shape) -> list[Compared]:
        server, first = subject.server, subject.server.tokens(4000, shape.prefix)
        salt = await server.fresh()
        earlier = await server.answer(first, salt)
        prompt = first + (earlier.tokens or []) + server.tokens(4001, shape.suffix)
        answer = await server.answer(prompt, salt)
        reference = await server.uncached(prompt)
        return [Compared(shape, prompt, answer, reference.choices)]

    if (await subject.server.uncached(subject.server.tokens(4000, 8))).tokens is None:
        return not_applicable("the server does not report the ids of its tokens")
    block, half = subject.server.block, subject.test.output // 2
    # the answer ends around a boundary, or crosses it
    starts = {
        end - shift
        for end in subject.ends
        for shift in (half, subject.test.output, 1)
        if end - shift > 0
    }
    shapes = [Shape(start) for start in sorted(starts) if start + block <= subject.longest]
    measured = await subject.check(trial, shapes)
    # as of hybrids; full_hit tells whether prompts are reused
    if measured.verdict == FAILED and measured.value is None:
        return not_applicable(
            "no turn reused tokens: the server stores nothing that decoding computed"
        )
    return measured


# ------------------------------------------------------------------------------
# Properties of requests at once: siblings of one prefix, and long prompts in chunks.
# ------------------------------------------------------------------------------


@LIVE.register("siblings")
async def siblings(subject: LiveSubject) -> Measurement:
    """Prompts of one prefix that are sent at once, before and after it is cached, are answered as
    uncached."""

    async def trial(shape: Shape) -> list[Compared]:
        server, count = subject.server, subject.test.settings.concurrency
        prefix, salt, compared = server.tokens(5000, shape.prefix), await server.fresh(), []
        for wave in range(2):
            prompts = [
                prefix + server.tokens(5001 + wave * count + number, shape.suffix)
                for number in range(count)
            ]
            compared.append((prompts, await server.together(prompts, salt)))
        return [
            Compared(shape, prompt, answer, (await server.uncached(prompt)).choices)
            for prompts, answers in compared
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    block = subject.server.block
    last = (subject.longest - SUFFIX - 1) // block * block  # long, so that siblings overlap
    return await subject.check(
        trial, [Shape(end + 1) for end in sorted({*subject.ends[:1], last}) if end]
    )


@LIVE.register("chunked")
async def chunked(subject: LiveSubject) -> Measurement:
    """A long prompt whose chunks begin after a cached prefix, alone and beside others, is answered
    as uncached."""
    chunk = subject.test.settings.chunk_tokens
    if chunk is None:
        return not_applicable("live.chunk_tokens=null: the prompt tokens of a step are unknown")

    async def trial(shape: Shape) -> list[Compared]:
        server, prefix = subject.server, subject.server.tokens(6000, shape.prefix)
        prompt, answers = prefix + server.tokens(6001, shape.suffix), []
        for companions in (0, subject.test.settings.concurrency - 1):
            salt = await server.fresh()
            await server.answer(prefix, salt, 1)
            others = [server.tokens(6002 + number, SUFFIX + number) for number in range(companions)]
            answers.append((await server.together([prompt, *others], salt))[0])
        reference = await server.uncached(prompt)
        return [
            Compared(
                shape, prompt, answer, reference.choices, answer.cached > 0 and shape.suffix > chunk
            )
            for answer in answers
        ]

    shapes = [
        Shape(end + 1, subject.longest - end - 1)
        for end in subject.ends
        if subject.longest - end - 1 > chunk
    ]
    if not shapes:
        return not_applicable(
            f"live.largest_prompt={subject.longest} is no prompt of two chunks of {chunk:,} tokens"
        )
    return await subject.check(trial, shapes, "reused tokens and had several chunks")


# ------------------------------------------------------------------------------
# Properties of a full cache: eviction and preemption; and drafted tokens. Metrics of the server
# tell whether they occurred.
# ------------------------------------------------------------------------------

_PREEMPTIONS = "vllm:num_preemptions_total"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


async def _capacity(subject: LiveSubject) -> int | None:
    """Tokens that the cache has room for, by the metrics of vLLM."""
    metrics = await subject.server.metrics()
    tokens = metrics.get("num_gpu_blocks", 0) * metrics.get("block_size", 0)
    return int(tokens) or None


@LIVE.register("after_eviction")
async def after_eviction(subject: LiveSubject) -> Measurement:
    """Prompts that other prompts evicted, in part or entirely, are answered as uncached."""
    limit, capacity = subject.test.settings.fill_tokens, await _capacity(subject)
    if capacity is not None and capacity > limit:
        return not_applicable(
            f"the cache has room for {capacity:,} tokens, live.fill_tokens={limit:,} evict nothing"
        )

    async def trial(shape: Shape) -> list[Compared]:
        server, salt = subject.server, await subject.server.fresh()
        victims = [
            server.tokens(7000 + number, shape.prefix + number)
            for number in range(subject.test.prompts)
        ]
        before = []
        for victim in victims:
            await server.answer(victim, salt, 1)
            before.append((await server.answer(victim, salt, 1)).cached)
        room = limit if capacity is None else capacity
        await _fill(subject, salt, room - sum(map(len, victims)) // 2)
        answers = [await server.answer(victim, salt) for victim in victims]
        return [
            Compared(
                shape,
                victim,
                answer,
                (await server.uncached(victim)).choices,
                answer.cached < cached,
            )
            for victim, answer, cached in zip(victims, answers, before, strict=True)
        ]

    measured = await subject.check(
        trial, [Shape(end + 1, 0) for end in subject.ends[-1:]], "were evicted"
    )
    if measured.value is None:
        return not_applicable(
            f"no prompt was evicted by live.fill_tokens={limit:,} tokens of others"
        )
    return measured


async def _fill(subject: LiveSubject, salt: str, tokens: int) -> None:
    """Send other prompts of so many tokens in total."""
    server, number = subject.server, 0
    while tokens > 0:
        length = max(2, min(tokens, subject.longest))
        await server.answer(server.tokens(8000 + number, length), salt, 1)
        tokens, number = tokens - length, number + 1


@LIVE.register("preemption")
async def preemption(subject: LiveSubject) -> Measurement:
    """Requests that together need more memory than there is, so that some are preempted, are
    answered as uncached."""
    settings, capacity = subject.test.settings, await _capacity(subject)
    if capacity is None or _PREEMPTIONS not in await subject.server.metrics():
        return not_applicable(
            "the server has no /metrics that report preemptions and the size of the cache"
        )
    count = settings.concurrency
    # prompts fit into the cache together, their outputs do not
    prompt = min(subject.longest, capacity * 3 // (4 * count))
    output = capacity * 3 // (2 * count) - prompt
    if output > settings.long_output or prompt + output > capacity:
        longest = prompt + settings.long_output
        return not_applicable(
            f"the cache has room for {capacity:,} tokens, live.concurrency={count} requests of {longest:,} fill it not"
        )

    async def trial(shape: Shape) -> list[Compared]:
        server, salt = subject.server, await subject.server.fresh()
        prompts = [
            server.tokens(9000 + number, shape.prefix - number % 3) for number in range(count)
        ]
        earlier = (await server.metrics()).get(_PREEMPTIONS, 0)
        answers = await server.together(prompts, salt, output)
        times = (await server.metrics()).get(_PREEMPTIONS, 0) - earlier
        return [
            Compared(
                shape, prompt, answer, (await server.uncached(prompt, output)).choices, times > 0
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    measured = await subject.check(trial, [Shape(prompt, 0)], "ran while requests were preempted")
    if measured.value is None:
        return not_applicable(
            f"the server preempted none of {count} requests of {prompt + output:,} tokens"
        )
    return measured


@LIVE.register("drafts")
async def drafts(subject: LiveSubject) -> Measurement:
    """Drafted answers equal those of requests for one token each, in which nothing is drafted."""
    metrics = await subject.server.metrics()
    if subject.test.settings.drafts is False or not (
        subject.test.settings.drafts or _DRAFTED in metrics
    ):
        return not_applicable(
            "the server reports no drafts; live.drafts=true tests it nevertheless"
        )

    async def trial(shape: Shape) -> list[Compared]:
        server, pattern = subject.server, subject.server.tokens(10_000, 7)
        prompt = (pattern * shape.prefix)[: shape.prefix]  # drafters expect repetitions
        await server.uncached(prompt)  # some drafters learn from answers
        earlier = (await server.metrics()).get(_ACCEPTED, 0)
        answer = await server.uncached(prompt)
        accepted = (await server.metrics()).get(_ACCEPTED, 0) - earlier
        tokens, reference = answer.tokens or [], list[Choice]()
        for index in range(len(tokens)):
            reference += (await server.uncached(prompt + tokens[:index], 1)).choices
        return [
            Compared(shape, prompt, answer, reference, accepted > 0 or _ACCEPTED not in metrics)
        ]

    shapes = [Shape(end + 1, 0) for end in subject.ends]
    if (await subject.server.uncached(subject.server.tokens(10_000, 8))).tokens is None:
        return not_applicable("the server does not report the ids of its tokens")
    measured = await subject.check(trial, shapes, "have accepted drafts")
    return (
        measured if measured.value is not None else not_applicable("the server accepted no draft")
    )


# ------------------------------------------------------------------------------
# The test of one server: what it reports, its noise, then each property.
# ------------------------------------------------------------------------------

_UNCACHED = (
    "the server reports no cached tokens (vLLM: --enable-prompt-tokens-details), or has no cache"
)
_UNSEPARATED = (
    "prompts reuse tokens under another cache_salt, so no answer is known to be uncached; "
    "expected server.reset_path"
)


Facts = dict[str, object]


def check_server(
    test: LiveTest, chosen: Sequence[str], folder: Path, measured: Measurements, facts: Facts
) -> None:
    """Add each measurement as it finishes, and facts of the server; ServerGoneError where it
    ends."""
    asyncio.run(_test(test, chosen, folder, measured, facts))


async def _test(
    test: LiveTest, chosen: Sequence[str], folder: Path, measured: Measurements, facts: Facts
) -> None:
    key = api_key("server.api_key_variable", test.server.api_key_variable)
    patience = Patience(test.server.timeout_s, test.server.request_timeout_s)
    async with Endpoint(str(test.server.base_url), key, patience) as endpoint:
        model = test.server.served_model or await only_model(endpoint, str(test.server.base_url))
        server = LiveServer(
            endpoint, model, test.server, test.settings, test.vocab_size, test.output
        )
        subject = LiveSubject(test, server, folder)
        with _progress(server, len(chosen) + 1) as finished:
            try:
                reason = await _probe(subject)
            except FailedRequestError as failure:
                sizes = f"live.largest_prompt={test.settings.largest_prompt} token ids"
                expected = f"expected answers with log-probabilities to prompts of up to {sizes}"
                raise ValueError(
                    f"base_url={test.server.base_url}: {expected}: {failure}"
                ) from failure
            facts["server"] = {"base_url": test.server.base_url, "model": model}
            facts |= {
                "reference": server.reference,
                "block_size": server.block,
                "calls": server.calls,
            }
            for name in (NOISE, *chosen):
                subject.name = name
                measured[name] = await _measure(subject, reason)
                facts["calls"] = server.calls
                finished(name, measured[name])


async def _measure(subject: LiveSubject, reason: str) -> Measurement:
    """Measure one property; `reason` is why answers cannot be compared, empty if they can."""
    if reason and not (reason == _UNSEPARATED and subject.name == "salt_isolation"):
        return not_applicable(reason)
    try:
        return await (
            noise(subject) if subject.name == NOISE else LIVE[subject.name](subject=subject)
        )
    except CachedReferenceError as error:
        return Measurement(None, subject.limit, f"expected uncached answers, but {error}")
    except FailedRequestError as failure:
        try:
            await subject.server.endpoint.models()
        except FailedRequestError as end:
            expected = "expected answers until the end of the test"
            raise ServerGoneError(
                f"base_url={subject.test.server.base_url}: {expected}: {end}"
            ) from failure
        if str(failure).startswith("HTTP 4"):
            return not_applicable(f"the server refused a request: {failure}")
        return Measurement(None, subject.limit, f"a request failed: {failure}")


async def _probe(subject: LiveSubject) -> str:
    """Choose how answers are made uncached, and measure the block size; return why that cannot be,
    or nothing."""
    server, settings = subject.server, subject.test.settings
    server.reference = RESET if settings.reference == RESET else SALT
    prompt = server.tokens(0, subject.longest - subject.test.output)
    cached = await _repeated(server, prompt)
    if not cached:
        return _UNCACHED
    if server.reference == SALT and (await server.answer(prompt, await server.fresh(), 1)).cached:
        if settings.reference == SALT or subject.test.server.reset_path is None:
            return _UNSEPARATED
        server.reference = RESET
    server.block = settings.block_size or await _block_size(server, prompt, cached)
    return ""


async def _block_size(server: LiveServer, prompt: Sequence[int], cached: int) -> int:
    """Cached tokens of the shortest prompt that reuses any when it is repeated."""
    none, some = 1, len(prompt)
    while some - none > 1:
        middle = (none + some) // 2
        reused = await _repeated(server, prompt[:middle])
        none, some, cached = (none, middle, reused) if reused else (middle, some, cached)
    return cached


async def _repeated(server: LiveServer, prompt: Sequence[int]) -> int:
    """Cached tokens of a prompt that is sent twice."""
    salt = await server.fresh()
    await server.answer(prompt, salt, 1)
    return (await server.answer(prompt, salt, 1)).cached


@contextmanager
def _progress(server: LiveServer, count: int) -> Iterator[Callable[[str, Measurement], None]]:
    """Show finished properties and calls on the terminal; yields a function to call after each
    property."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task("probing", total=count)

        def finished(name: str, measured: Measurement) -> None:
            bars.update(task, advance=1, description=f"{server.calls:,} calls")
            print_line(console, f"{name}: {measured.verdict}")

        yield finished
