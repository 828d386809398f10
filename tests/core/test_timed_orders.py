"""Orders that depend on time, against list versions of their rules on trees with blocks of one token."""

import re
from dataclasses import dataclass

import numpy as np
import pytest

from spanlab.core.admission import always
from spanlab.core.eviction import EvictionRules
from spanlab.core.eviction.orders import EVICTION_ORDERS
from spanlab.core.plan import DecodeBatch
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.policies.tree_variants import PinningPolicy
from spanlab.core.request import Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import PrefixTree

from ..support.policies import make_tree_policy
from .factories import KV, STATE, assert_drained, at, make_budget, walk

S = 1_000_000_000
PINS = EvictionRules({"seconds": 5.0}, continued=frozenset({0}))
Path = tuple[int, ...]


@dataclass
class Block:
    """Retention of a token of a path in the list version; times in nanoseconds."""

    priority: int
    duration: int | None
    since: int = 0
    tick: int = 0
    expires_at: int | None = None


class PublishedPriority:
    """Blocks in a dictionary; every eviction ranks all leaves."""

    def __init__(self, capacity: int, ranges: list[dict], decode: int, decode_ns: int | None) -> None:
        self.capacity, self.ranges, self.output = capacity, ranges, (decode, decode_ns)
        self.blocks: dict[Path, Block] = {}
        self.tick = 0

    def retention(self, position: int, prompt: int) -> tuple[int, int | None] | None:
        if position >= prompt:
            return self.output
        ranges = [setting for setting in self.ranges if setting["start"] <= position < setting["stop"]]
        return (ranges[0]["priority"], ranges[0]["seconds"] and ranges[0]["seconds"] * S) if ranges else None

    def start(self, block: Block, now: int) -> None:
        block.since, block.tick = now, self.tick
        block.expires_at = None if block.duration is None or block.priority == 35 else now + block.duration

    def evict(self, more: int, locked: set[Path], now: int) -> None:
        while len(self.blocks) + more > self.capacity:
            self.evict_one(locked, now)

    def evict_one(self, locked: set[Path], now: int) -> None:
        for path, block in self.blocks.items():
            if block.expires_at is not None and block.expires_at <= now and path not in locked:
                block.priority, block.duration, block.since, block.expires_at = 35, None, block.expires_at, None
        parents = {path[:-1] for path in self.blocks}
        free = [path for path in self.blocks if path not in parents and path not in locked]
        ranks = {path: (self.blocks[path].priority, self.blocks[path].since, self.blocks[path].tick) for path in free}
        del self.blocks[min(free, key=ranks.__getitem__)]

    def store(self, tokens: Path, prompt: int, now: int) -> None:
        self.tick += 1
        for length in range(1, len(tokens) + 1):
            priority, duration = self.retention(length - 1, prompt) or (35, None)
            self.start(self.blocks.setdefault(tokens[:length], Block(priority, duration)), now)

    def serve(self, prompt: Path, output: Path, now: int) -> int:
        self.tick += 1
        paths = [prompt[:length] for length in range(1, len(prompt) + 1)]
        matched = [path for path in paths if path in self.blocks]
        for path in matched:
            block, retention = self.blocks[path], self.retention(len(path) - 1, len(prompt))
            block.priority, block.duration = retention or (block.priority, None)
            self.start(block, now)
        reused = matched[: len(prompt) - 1]
        self.evict(len(prompt) - len(reused), set(reused), now)
        self.store(prompt, len(prompt), now)
        self.evict(len(output), set(paths), now)
        self.store(prompt + output, len(prompt), now)
        return len(reused)


def on_blocks(capacity: int, eviction: str, rules: EvictionRules, *more, **kind) -> TreePolicy:
    """Return a policy with room for so many blocks of one token."""
    sizes = {"budget": make_budget(tokens=capacity), "kv_bytes": KV, "fixed_blocks": True}
    return make_tree_policy(None, *more, eviction=eviction, eviction_rules=rules, **sizes, **kind)


def request_of(prompt: Path, output: Path, id: int, after: tuple[int, ...] = ()) -> Request:
    span = Span(np.array(prompt, np.int32))
    return Request(id, 0, (span,), output_len=len(output) + 1, output=np.array([*output, 9], np.int32), after=after)


def stored(policy: TreePolicy) -> set[Path]:
    """Return every stored prefix."""
    ends = [path for root in policy.index.all() for path, _ in walk(root)]
    return {path[:length] for path in ends for length in range(1, len(path) + 1)}


def serve(policy: TreePolicy, request: Request, output: Path, now: int) -> int:
    """Serve a request at one time; return the reused tokens."""
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
    policy = on_blocks(capacity, "priority", EvictionRules(options))
    published = PublishedPriority(capacity, RANGES, options["decode"], 21 * S)
    now, reused = 0, 0
    for id in range(400):
        now += int(rng.integers(1, 9)) * S
        prompt, output = drawn(rng)
        tokens = serve(policy, request_of(prompt, output, id), output, now)
        assert tokens == published.serve(prompt, output, now)
        assert stored(policy) == set(published.blocks)
        reused += tokens
    assert reused > 50


class PublishedPins:
    """Paths in order of use, and pinned paths; pins are released in order of their end where a request does not fit."""

    def __init__(self, capacity: int, ttl: int, on: str, continued: set[int]) -> None:
        self.capacity, self.ttl, self.on, self.continued = capacity, ttl, on, continued
        self.used: dict[Path, int] = {}
        self.pins: dict[int, tuple[int, Path]] = {}
        self.tick = self.num_released = 0

    def locked(self, reused: Path) -> set[Path]:
        paths = [reused, *[path for _, path in self.pins.values()]]
        return {path[:length] for path in paths for length in range(1, len(path) + 1)}

    def serve(self, request: Request, prompt: Path, output: Path, now: int) -> int:
        self.tick += 1
        self.pins = {id: pin for id, pin in self.pins.items() if pin[0] > now}
        matched = [prompt[:length] for length in range(1, len(prompt) + 1) if prompt[:length] in self.used]
        tokens, reused = prompt + output, prompt[: min(len(matched), len(prompt) - 1)]
        self.release_pins(len(prompt) - len(reused), reused)
        self.used |= dict.fromkeys(matched, self.tick)
        self.evict(len(prompt) - len(reused), reused)
        for earlier in request.after:
            self.pins.pop(earlier, None)
        if self.on == "read":
            self.pins[request.id] = now + self.ttl, reused
        self.tick += 1
        self.used |= {prompt[:length]: self.tick for length in range(1, len(prompt) + 1)}
        self.release_pins(len(output), prompt)
        self.evict(len(output), prompt)
        self.used |= {tokens[:length]: self.tick for length in range(1, len(tokens) + 1)}
        if request.id in self.continued:
            self.pins[request.id] = now + self.ttl, tokens
        return len(reused)

    def release_pins(self, more: int, reused: Path) -> None:
        while len(self.locked(reused)) + more > self.capacity:
            del self.pins[min(self.pins, key=lambda id: (self.pins[id][0], id))]
            self.num_released += 1

    def evict(self, more: int, reused: Path) -> None:
        while len(self.used) + more > self.capacity:
            parents, locked = {path[:-1] for path in self.used}, self.locked(reused)
            free = [path for path in self.used if path not in parents and path not in locked]
            del self.used[min(free, key=self.used.__getitem__)]


def sessions(rng: np.random.Generator, count: int) -> list[tuple[Request, Path, Path]]:
    """Return turns of sessions; each repeats the previous turn of its session, or starts a session."""
    turns, open_turns = [], []
    for id in range(count):
        after, history = open_turns.pop(int(rng.integers(len(open_turns)))) if len(open_turns) > 3 else ((), ())
        prompt = history + tuple(rng.integers(0, 4, rng.integers(1, 4)).tolist())
        output = tuple(rng.integers(0, 4, rng.integers(0, 3)).tolist())
        turns.append((request_of(prompt, output, id, after), prompt, output))
        open_turns.append(((id,), prompt + output) if len(prompt) < 9 else ((), ()))
    return turns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("order", "on"), [("ttl_pins", "end"), ("lease", "read")])
def test_pins_equal_their_list_version(order, on, seed):
    rng, capacity = np.random.default_rng([seed, len(on)]), 30
    turns = sessions(rng, 300)
    continued = frozenset(earlier for request, _, _ in turns for earlier in request.after)
    policy = on_blocks(
        capacity, order, EvictionRules({"seconds": 60.0}, continued=continued), always(), kind=PinningPolicy
    )
    published = PublishedPins(capacity, 60 * S, on, continued if on == "end" else set())
    now, reused = 0, 0
    for request, prompt, output in turns:
        now += int(rng.integers(1, 9)) * S
        tokens = serve(policy, request, output, now)
        assert tokens == published.serve(request, prompt, output, now)
        assert stored(policy) == set(published.used)
        reused += tokens
    assert reused > 200
    assert published.num_released or on == "read"
    policy.start_step(now + 61 * S)
    assert_drained(policy)


def test_a_pin_makes_others_wait_while_one_runs():
    policy = on_blocks(10, "ttl_pins", PINS, always(), kind=PinningPolicy)
    serve(policy, request_of((1, 2, 3, 4, 5, 6), (), 0), (), 0)
    policy.start_step(S)
    running = policy.allocate(policy.match(request_of((7, 7), (), 1), S), S)
    waiting = request_of((8, 8, 8), (), 2)
    assert running is not None
    assert policy.futile_steps(waiting, DecodeBatch()) == 0
    assert policy.allocate(policy.match(waiting, 4 * S), 4 * S) is None
    policy.start_step(5 * S)
    assert policy.allocate(policy.match(waiting, 5 * S), 5 * S) is not None


def test_pins_hold_the_deepest_state_too():
    rules, budget = ReuseRules(needs_states=True), make_budget(tokens=12, states=3)
    sizes = {"budget": budget, "kv_bytes": KV, "state_bytes": STATE, "eviction": "ttl_pins", "eviction_rules": PINS}
    policy = make_tree_policy(rules, always(), kind=PinningPolicy, placer=at(3, 5), **sizes)
    serve(policy, request_of((1, 2, 3, 4, 5), (), 0), (), 0)
    assert policy.store.state_locked == STATE
    serve(policy, request_of((9, 9, 9, 9, 9), (), 1), (), S)
    assert policy.checkpoints(request_of((1, 2, 3, 4, 5), (), 2)) == [5]
    policy.start_step(5 * S)
    assert_drained(policy)


@pytest.mark.parametrize(
    ("eviction", "options", "message"),
    [
        ("priority", {"ranges": [{"priority": 101}]}, "ranges[0].priority=101: expected a number from 1 to 100"),
        ("priority", {"ranges": [{"stop": 5}, {"start": 4}]}, "ranges[1].start=4: expected the end of the range"),
        ("priority", {"ranges": [{"from": 5}]}, "expected an object of start, stop, priority and seconds"),
        ("priority", {"ranges": [{"start": 5, "stop": 5}]}, "ranges[0].stop=5: expected a position behind start=5"),
        ("lease", {"order": "ttl_pins"}, "order=ttl_pins: expected one of"),
        ("lease", {"order": "slru", "order_options": {"small": 0.1}}, "order_options.small: no such option of slru"),
    ],
)
def test_options_that_make_no_sense_are_refused(eviction, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Store(PrefixTree(), KV, 0, make_budget(tokens=9), eviction, EvictionRules(options))


@pytest.mark.parametrize(
    ("eviction", "options", "message"),
    [
        ("priority", {"decode": 0}, "options.decode=0: expected"),
        ("priority", {"expired": "old"}, "options.expired=old: expected one of newest, by_use"),
        ("ttl_pins", {"seconds": 0.0}, "options.seconds=0.0: expected a number above zero"),
    ],
)
def test_options_out_of_their_declared_bounds_are_refused(eviction, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        EVICTION_ORDERS.check("options", eviction, f"eviction={eviction}", options)
