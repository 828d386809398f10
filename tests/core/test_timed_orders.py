"""Orders that read the clock, against list versions of their rules on trees whose blocks are single tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

from spanlab.core.admission import always
from spanlab.core.eviction import EvictionRules
from spanlab.core.placement import no_states
from spanlab.core.policies.pinning import PinningPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.prefix_index import SharedIndex
from spanlab.core.request import Request, Span
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import PrefixTree

from .factories import KV, STATE, assert_drained, at, make_budget, walk

S = 1_000_000_000
Path = tuple[int, ...]


@dataclass
class Block:
    """What the list version knows of a token of a path."""

    priority: int
    lasts: int | None
    since: int = 0
    tick: int = 0
    ends: int | None = None


class PublishedPriority:
    """Blocks in a dictionary; every eviction looks at all leaves."""

    def __init__(self, capacity: int, ranges: list[dict], decode: int, decode_ns: int | None) -> None:
        self.capacity, self.ranges, self.output = capacity, ranges, (decode, decode_ns)
        self.blocks: dict[Path, Block] = {}
        self.tick = 0

    def said(self, position: int, prompt: int) -> tuple[int, int | None] | None:
        if position >= prompt:
            return self.output
        found = [one for one in self.ranges if one["start"] <= position < one["stop"]]
        return (found[0]["priority"], found[0]["seconds"] and found[0]["seconds"] * S) if found else None

    def start(self, block: Block, now: int) -> None:
        block.since, block.tick = now, self.tick
        block.ends = None if block.lasts is None or block.priority == 35 else now + block.lasts

    def evict(self, more: int, locked: set[Path], now: int) -> None:
        while len(self.blocks) + more > self.capacity:
            self.evict_one(locked, now)

    def evict_one(self, locked: set[Path], now: int) -> None:
        for path, block in self.blocks.items():
            if block.ends is not None and block.ends <= now and path not in locked:
                block.priority, block.lasts, block.since, block.ends = 35, None, block.ends, None
        parents = {path[:-1] for path in self.blocks}
        free = [path for path in self.blocks if path not in parents and path not in locked]
        ranks = {path: (self.blocks[path].priority, self.blocks[path].since, self.blocks[path].tick) for path in free}
        del self.blocks[min(free, key=ranks.__getitem__)]

    def store(self, whole: Path, prompt: int, now: int) -> None:
        self.tick += 1
        for length in range(1, len(whole) + 1):
            priority, lasts = self.said(length - 1, prompt) or (35, None)
            self.start(self.blocks.setdefault(whole[:length], Block(priority, lasts)), now)

    def ask(self, prompt: Path, output: Path, now: int) -> int:
        self.tick += 1
        paths = [prompt[:length] for length in range(1, len(prompt) + 1)]
        found = [path for path in paths if path in self.blocks]
        for path in found:
            block, said = self.blocks[path], self.said(len(path) - 1, len(prompt))
            block.priority, block.lasts = said or (block.priority, None)
            self.start(block, now)
        read = found[: len(prompt) - 1]
        self.evict(len(prompt) - len(read), set(read), now)
        self.store(prompt, len(prompt), now)
        self.evict(len(output), set(paths), now)
        self.store(prompt + output, len(prompt), now)
        return len(read)


def request_of(prompt: Path, output: Path, id: int, after: tuple[int, ...] = ()) -> Request:
    span = Span(np.array(prompt, np.int32))
    return Request(id, 0, (span,), output_len=len(output) + 1, output=np.array([*output, 9], np.int32), after=after)


def stored(policy: TreePolicy) -> set[Path]:
    """Every beginning of what is stored."""
    ends = [path for root in policy.index.all() for path, _ in walk(root)]
    return {path[:length] for path in ends for length in range(1, len(path) + 1)}


def serve(policy: TreePolicy, request: Request, output: Path, now: int) -> int:
    """Serve a request at one moment; returns what it reads."""
    policy.start_step(now)
    plan = policy.match(request, now)
    allocation = policy.allocate(plan, now)
    assert allocation is not None
    policy.insert(allocation, plan.prompt, now)
    assert policy.append(allocation, plan.prompt, plan.prompt + len(output))
    policy.finish(allocation, len(output), now)
    policy.free(allocation, now)
    policy.check()
    return plan.resume


RANGES = [
    {"start": 0, "stop": 1, "priority": 80, "seconds": 40},
    {"start": 1, "stop": 2, "priority": 20, "seconds": None},
    {"start": 2, "stop": 3, "priority": 60, "seconds": 13},
    {"start": 3, "stop": 4, "priority": 35, "seconds": 5},
]


def drawn(rng: np.random.Generator) -> tuple[Path, Path]:
    prompt = tuple(rng.integers(0, 3, rng.integers(1, 6)).tolist())
    return prompt, tuple(rng.integers(0, 3, rng.integers(0, 3)).tolist())


@pytest.mark.parametrize("seed", range(4))
def test_priority_equals_its_list_version(seed):
    rng, capacity = np.random.default_rng(seed), 20
    options = {"ranges": RANGES, "decode": 10 + 40 * (seed % 2), "decode_seconds": 21.0}
    store = Store(PrefixTree(1, True), KV, 0, make_budget(tokens=capacity), "priority", EvictionRules(options))
    policy = TreePolicy(ReuseRules(), store, SharedIndex(store.tree), no_states())
    published = PublishedPriority(capacity, RANGES, options["decode"], 21 * S)
    now, reused = 0, 0
    for id in range(400):
        now += int(rng.integers(1, 9)) * S
        prompt, output = drawn(rng)
        read = serve(policy, request_of(prompt, output, id), output, now)
        assert read == published.ask(prompt, output, now)
        assert stored(policy) == set(published.blocks)
        reused += read
    assert reused > 50


class PublishedPins:
    """Paths in order of use, and pinned paths; a pin that ends first gives way where a request does not fit."""

    def __init__(self, capacity: int, ttl: int, on: str, goes_on: set[int]) -> None:
        self.capacity, self.ttl, self.on, self.goes_on = capacity, ttl, on, goes_on
        self.used: dict[Path, int] = {}
        self.pins: dict[int, tuple[int, Path]] = {}
        self.tick = self.gave_way = 0

    def locked(self, read: Path) -> set[Path]:
        paths = [read, *[path for _, path in self.pins.values()]]
        return {path[:length] for path in paths for length in range(1, len(path) + 1)}

    def ask(self, request: Request, prompt: Path, output: Path, now: int) -> int:
        self.tick += 1
        self.pins = {one: pin for one, pin in self.pins.items() if pin[0] > now}
        found = [prompt[:length] for length in range(1, len(prompt) + 1) if prompt[:length] in self.used]
        whole, read = prompt + output, prompt[: min(len(found), len(prompt) - 1)]
        self.give_way(len(prompt) - len(read), read)
        self.used |= dict.fromkeys(found, self.tick)
        self.evict(len(prompt) - len(read), read)
        for earlier in request.after:
            self.pins.pop(earlier, None)
        if self.on == "read":
            self.pins[request.id] = now + self.ttl, read
        self.tick += 1
        self.used |= {prompt[:length]: self.tick for length in range(1, len(prompt) + 1)}
        self.give_way(len(output), prompt)
        self.evict(len(output), prompt)
        self.used |= {whole[:length]: self.tick for length in range(1, len(whole) + 1)}
        if request.id in self.goes_on:
            self.pins[request.id] = now + self.ttl, whole
        return len(read)

    def give_way(self, more: int, read: Path) -> None:
        while len(self.locked(read)) + more > self.capacity:
            del self.pins[min(self.pins, key=lambda one: (self.pins[one][0], one))]
            self.gave_way += 1

    def evict(self, more: int, read: Path) -> None:
        while len(self.used) + more > self.capacity:
            parents, locked = {path[:-1] for path in self.used}, self.locked(read)
            free = [path for path in self.used if path not in parents and path not in locked]
            del self.used[min(free, key=self.used.__getitem__)]


def sessions(rng: np.random.Generator, count: int) -> list[tuple[Request, Path, Path]]:
    """Turns of sessions, each of which repeats what was said before, or gives it up."""
    asked, open_turns = [], []
    for id in range(count):
        after, said = open_turns.pop(int(rng.integers(len(open_turns)))) if len(open_turns) > 3 else ((), ())
        prompt = said + tuple(rng.integers(0, 4, rng.integers(1, 4)).tolist())
        output = tuple(rng.integers(0, 4, rng.integers(0, 3)).tolist())
        asked.append((request_of(prompt, output, id, after), prompt, output))
        open_turns.append(((id,), prompt + output) if len(prompt) < 9 else ((), ()))
    return asked


def pinning(capacity: int, order: str, rules: EvictionRules) -> PinningPolicy:
    store = Store(PrefixTree(1, True), KV, 0, make_budget(tokens=capacity), order, rules)
    return PinningPolicy(ReuseRules(), store, SharedIndex(store.tree), no_states(), always())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("order", "on"), [("ttl_pins", "end"), ("lease", "read")])
def test_pins_equal_their_list_version(order, on, seed):
    rng, capacity = np.random.default_rng([seed, len(on)]), 30
    asked = sessions(rng, 300)
    goes_on = {earlier for request, _, _ in asked for earlier in request.after}
    told = frozenset(goes_on)
    policy = pinning(capacity, order, EvictionRules({"seconds": 60.0}, goes_on=told))
    published = PublishedPins(capacity, 60 * S, on, goes_on if on == "end" else set())
    now, reused = 0, 0
    for request, prompt, output in asked:
        now += int(rng.integers(1, 9)) * S
        read = serve(policy, request, output, now)
        assert read == published.ask(request, prompt, output, now)
        assert stored(policy) == set(published.used)
        reused += read
    assert reused > 200
    assert published.gave_way or on == "read"
    policy.start_step(now + 61 * S)
    assert_drained(policy)


def test_a_pin_makes_others_wait_while_one_runs():
    policy = pinning(10, "ttl_pins", EvictionRules({"seconds": 5.0}, goes_on=frozenset({0})))
    serve(policy, request_of((1, 2, 3, 4, 5, 6), (), 0), (), 0)
    policy.start_step(S)
    running = policy.allocate(policy.match(request_of((7, 7), (), 1), S), S)
    waiting = request_of((8, 8, 8), (), 2)
    assert running is not None
    assert policy.retries_each_step
    assert policy.allocate(policy.match(waiting, 4 * S), 4 * S) is None
    policy.start_step(5 * S)
    assert policy.allocate(policy.match(waiting, 5 * S), 5 * S) is not None


def test_pins_hold_the_deepest_state_too():
    budget = make_budget(tokens=12, states=3)
    store = Store(PrefixTree(), KV, STATE, budget, "ttl_pins", EvictionRules({"seconds": 5.0}, goes_on=frozenset({0})))
    policy = PinningPolicy(ReuseRules(needs_states=True), store, SharedIndex(store.tree), at(3, 5), always())
    serve(policy, request_of((1, 2, 3, 4, 5), (), 0), (), 0)
    assert store.state_locked == STATE
    serve(policy, request_of((9, 9, 9, 9, 9), (), 1), (), S)
    assert policy.checkpoints(request_of((1, 2, 3, 4, 5), (), 2)) == [5]
    policy.start_step(5 * S)
    assert_drained(policy)


@pytest.mark.parametrize(
    ("eviction", "options", "said"),
    [
        ("priority", {"ranges": [{"priority": 101}]}, "ranges[0].priority=101: expected a number from 1 to 100"),
        ("priority", {"ranges": [{"stop": 5}, {"start": 4}]}, "ranges[1].start=4: expected the end of the range"),
        ("priority", {"ranges": [{"from": 5}]}, "expected an object of start, stop, priority and seconds"),
        ("priority", {"ranges": [{"start": 5, "stop": 5}]}, "ranges[0].stop=5: expected a position behind start=5"),
        ("priority", {"decode": 0}, "decode.priority=0: expected a number from 1 to 100"),
        ("priority", {"expired": "old"}, "expired=old: expected one of newest, by_use"),
        ("ttl_pins", {"seconds": 0.0}, "seconds=0.0: expected a number above zero"),
        ("lease", {"order": "ttl_pins"}, "order=ttl_pins: expected one of"),
        ("lease", {"order": "slru", "order_options": {"small": 0.1}}, "order_options.small: no such option of slru"),
    ],
)
def test_options_that_make_no_sense_are_refused(eviction, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Store(PrefixTree(), KV, 0, make_budget(tokens=9), eviction, EvictionRules(options))
