"""Several prompts of spans under any order of operations: every plan, byte and lock, checked against the store."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from spanlab.core.plan import PrefillRange, ReusePlan, TreeAllocation
from spanlab.core.repair import Repair
from spanlab.core.tree import as_seen, conditioned, isolated

from .factories import BLIND_EVICTIONS, KV, common, doc, make_budget, make_policy, make_prompt, text, walk
from .machine import RunningRequests, machine, top

budgets = st.builds(
    make_budget,
    tokens=st.none() | st.integers(20, 70),
    total=st.none() | st.integers(50, 160),
    entries=st.none() | st.integers(2, 6),
)
REPAIRS = [
    (Repair(), False),
    (Repair(), True),
    (Repair("first", k=1), False),
    (Repair("first", k=3), True),
    (Repair("last", k=2), False),
    (Repair("random", k=2), False),
    (Repair("strided", ratio=0.3), False),
    (Repair("deviation", ratio=0.3), True),
]
parts = st.tuples(st.booleans(), st.lists(st.integers(0, 1), max_size=4).map(tuple))


@dataclass
class Running:
    """A request that holds an allocation, as tracked by the test."""

    keys: list  # by cache span, what its KV depends on besides its tokens
    tokens: list[tuple[int, ...]]  # by cache span
    plan: ReusePlan
    allocation: TreeAllocation
    work_index: int = 0  # work in progress
    rows_done: int = 0  # its rows computed so far
    stored: list[int] = field(default_factory=list)


def cut(prompt):
    """(independent, tokens) of every cache span, token by token."""
    marked = [
        (index if independent else -1, token) for index, (independent, tokens) in enumerate(prompt) for token in tokens
    ]
    marked[-1] = (-1, marked[-1][1])
    cache_spans = []
    for label, token in marked:
        if cache_spans and cache_spans[-1][0] == label:
            cache_spans[-1][1].append(token)
        else:
            cache_spans.append((label, [token]))
    return [(label >= 0, tuple(tokens)) for label, tokens in cache_spans]


def pages(root, tokens, start, stop, block_size):
    """Names of the blocks that tokens `[start, stop)` of a path fill: all that leads to a block's end names it."""
    return {(id(root), tokens[:end]) for end in range(start + block_size, stop + 1, block_size)}


class SpanMachine(RunningRequests):
    """Plans, admits, computes work in pieces, grows, finishes and gives up; the layout is fixed by the subclass."""

    layout = staticmethod(isolated)

    @initialize(
        budget=budgets,
        block_size=st.sampled_from([1, 1, 2, 3]),
        fixed_blocks=st.booleans(),
        eviction=st.sampled_from(BLIND_EVICTIONS),
        repair=st.sampled_from(REPAIRS),
        keeps=st.sampled_from([True] * 7 + [False]),
    )
    def build(self, budget, block_size, fixed_blocks, eviction, repair, keeps):
        self.repair, self.copies = repair
        self.block_size, self.keeps = block_size, keeps
        self.policy = make_policy(
            budget,
            block_size=block_size,
            fixed_blocks=fixed_blocks,
            eviction=eviction,
            keeps=keeps,
            layout=self.layout,
            repair=self.repair,
            copies=self.copies,
        )
        self.now, self.running, self.prompts = 0, [], [()]
        self.roots = {}  # key -> root, from what was inserted
        self.remembered = {}  # key -> tokens, as far as they were computed

    def key(self, cache_salt, cache_spans, index):
        """A text that names all dependencies of a cache span's KV; None if there is none."""
        independent, _ = cache_spans[index]
        head = () if cache_spans[0][0] else cache_spans[0][1]
        if not independent and index and (self.repair.ratio or self.repair.kind == "random"):
            return None
        if self.layout is as_seen:
            return (cache_salt, "seen") if independent else (cache_salt,) if index == 0 else None
        if independent or index == 0:
            return (cache_salt, "after", head) if self.layout is conditioned and independent and head else (cache_salt,)
        return (cache_salt, head if self.layout is conditioned else (), *cache_spans[:index])

    # -- operations ---------------------------------------------------------------------------------------------------

    @rule(data=st.data(), more=st.lists(parts, max_size=3), cache_salt=st.sampled_from(["", "", "", "x"]))
    def start(self, data, more, cache_salt):
        base = data.draw(st.sampled_from(self.prompts))
        order = data.draw(st.permutations(base)) if data.draw(st.booleans()) else base
        prompt = (*order[: data.draw(st.integers(0, len(order)))], *more)[:5]
        if not any(tokens for _, tokens in prompt):
            return
        self.prompts.append(tuple(prompt))
        request = make_prompt(
            *((doc if independent else text)(*tokens) for independent, tokens in prompt), cache_salt=cache_salt
        )
        self.now += 1
        before = self.snapshot()
        plan = self.policy.match(request, self.now)
        assert self.snapshot() == before, "planning changed something"
        cache_spans = cut(prompt)
        keys = [self.key(cache_salt, cache_spans, index) for index in range(len(cache_spans))]
        self.examine(plan, keys, cache_spans)
        self.admit(plan, keys, cache_spans, before, data.draw(st.sampled_from([0, 0, 2])))

    def admit(self, plan, keys, cache_spans, before, generated):
        store = self.policy.store
        need = plan.prompt - plan.resume + self.own(plan, cache_spans) + generated  # a repeated span is held once
        locked = {name for root in self.policy.index.all() for name in self.locked(root)}
        for span_plan, (_, tokens) in zip(plan.cache_spans, cache_spans, strict=True):
            locked |= pages(
                top(span_plan.match_node),
                tokens,
                0,
                0 if span_plan.twin is not None else span_plan.resume,
                self.block_size,
            )
        required = (len(locked) * self.block_size + need) * KV + store.kv_reserved
        is_enough = required <= min(store.budget.kv_bytes, store.budget.total_bytes)
        allocation = self.policy.allocate(plan, self.now, generated)
        if allocation is None:
            assert not is_enough, "there was room"
            assert self.snapshot() == before, "a refused admission changed something"
            return
        self.running.append(
            Running(keys, [tokens for _, tokens in cache_spans], plan, allocation, stored=list(allocation.stored))
        )
        assert is_enough, "there was no room"
        assert allocation.kv_bytes == need * KV
        assert allocation.stored == [
            0 if span_plan.twin is not None else span_plan.resume for span_plan in plan.cache_spans
        ]
        assert store.kv_locked == len(locked) * self.block_size * KV
        assert sum(work.tokens for work in allocation.work) == plan.rows + generated

    @precondition(lambda self: any(running.work_index < len(running.allocation.work) for running in self.running))
    @rule(data=st.data())
    def compute(self, data):
        """As a step would: some of a cache span's rows, or a whole repair."""
        running = data.draw(
            st.sampled_from([running for running in self.running if running.work_index < len(running.allocation.work)])
        )
        work = running.allocation.work[running.work_index]
        take = work.tokens - running.rows_done
        if isinstance(work, PrefillRange):
            take = data.draw(st.integers(1, take) | st.just(take))
        start, stop = work.start, work.stop
        if isinstance(work, PrefillRange):
            start, stop = work.start + running.rows_done, work.start + running.rows_done + take
        running.rows_done += take
        if running.rows_done == work.tokens:
            running.work_index, running.rows_done = running.work_index + 1, 0
        self.now += 1
        for cache_span, _, end in work.cache_span_rows(running.plan, start, stop):
            self.store(running, cache_span, end)

    def store(self, running, cache_span, end):
        allocation, part = running.allocation, running.plan.cache_spans[cache_span].cache_span
        stored, reserved = allocation.stored[cache_span], allocation.kv_bytes
        self.policy.insert(allocation, end, self.now, cache_span)
        length, key = min(end, part.stop) - part.start, running.keys[cache_span]
        stop = length // self.block_size * self.block_size
        if key is None or not self.keeps or stop <= stored:
            assert (allocation.stored[cache_span], allocation.kv_bytes) == (stored, reserved)
        elif allocation.stored[cache_span] == stored:
            assert self.policy.store.budget.entries < 7, "only a budget of entries refuses"
        else:
            assert allocation.stored[cache_span] == allocation.nodes[cache_span].depth == stop
            assert allocation.kv_bytes == reserved - (stop - stored) * KV, "bytes change their owner once"
            assert self.roots.setdefault(key, top(allocation.nodes[cache_span])) is top(allocation.nodes[cache_span])
            running.stored[cache_span] = stop
        if key is not None:
            self.remembered.setdefault(key, []).append(running.tokens[cache_span][:length])

    # -- oracles ------------------------------------------------------------------------------------------------------

    def examine(self, plan, keys, cache_spans):
        """Every number of a plan, from the tokens that are present under each cache span's key."""
        assert len(plan.cache_spans) == len(cache_spans)
        assert [span_plan.cache_span.independent for span_plan in plan.cache_spans] == [kind for kind, _ in cache_spans]
        for index, (span_plan, key, (_, tokens)) in enumerate(zip(plan.cache_spans, keys, cache_spans, strict=True)):
            first = self.first(keys, cache_spans, index)
            if first < index:
                assert span_plan.seen == span_plan.matched == span_plan.resumable == span_plan.resume == len(tokens)
                assert span_plan.twin == first and sum(span_plan.losses) == 0
                continue
            root = self.roots.get(key)
            assert span_plan.twin is None
            paths = [path for path, _ in walk(root)] if root is not None else []
            matched = max((common(path, tokens) for path in paths), default=0) // self.block_size * self.block_size
            limit = len(tokens) - (index == len(cache_spans) - 1)
            assert (span_plan.matched, span_plan.resumable) == (matched, matched)
            assert span_plan.resume == min(matched, limit) // self.block_size * self.block_size
            common_lengths = [common(tokens, other) for other in self.remembered.get(key, [])]
            assert span_plan.seen == max([matched, *common_lengths])
            assert matched == 0 or top(span_plan.match_node) is root
            assert sum(span_plan.losses) + span_plan.resume == len(tokens)
            assert all(loss >= 0 for loss in span_plan.losses)
        spans = self.repairable(plan, cache_spans)
        lost = sum(min(self.repair.tokens, stored) for _, stored in spans)
        if self.repair.kind != "first":
            lost = self.repair.count(plan.spans) * sum(f for _, f in spans) // max(1, sum(n for n, _ in spans))
        assert plan.losses.repair == lost
        assert plan.reused + sum(plan.losses) == plan.prompt
        assert plan.reused >= 0

    def first(self, keys, cache_spans, index):
        """The first span of the prompt that has what this cache span has; itself where there is none."""
        if self.layout is as_seen or not self.keeps or not cache_spans[index][0]:
            return index
        return next(i for i in range(index + 1) if cache_spans[i] == cache_spans[index] and keys[i] == keys[index])

    def repairable(self, plan, cache_spans):
        """(length, found) of spans that have not seen all before them."""
        head = 0 if cache_spans[0][0] else len(cache_spans[0][1])
        spans, start = [], 0
        for span_plan, (independent, tokens) in zip(plan.cache_spans, cache_spans, strict=True):
            if independent and self.layout is as_seen and span_plan.resume:
                spans.append((span_plan.resume, span_plan.resume))
            if independent and self.layout is not as_seen and start > (head if self.layout is conditioned else 0):
                spans.append((len(tokens), span_plan.resume))
            start += len(tokens)
        return spans

    def own(self, plan, cache_spans):
        """Tokens that a request holds besides its prompt."""
        if self.copies:
            is_as_seen = self.layout is as_seen
            pairs = zip(plan.cache_spans, cache_spans, strict=True)
            return sum(
                span_plan.resume if is_as_seen else len(tokens)
                for span_plan, (independent, tokens) in pairs
                if independent
            )
        lengths, k, block_size = (
            [length for length, _ in self.repairable(plan, cache_spans)],
            self.repair.tokens,
            self.block_size,
        )
        if self.repair.kind == "first":
            return sum(
                sum(1 for position in range(length) if position // block_size * block_size < k) for length in lengths
            )
        if self.repair.kind == "last":
            return sum(length - max(0, length - k) // block_size * block_size for length in lengths)
        return min(sum(lengths), self.repair.count(plan.spans) * block_size)

    def locked(self, root):
        for path, node in walk(root):
            if node.locks:
                yield from pages(root, path, node.start, node.depth, self.block_size)

    @invariant()
    def what_an_allocation_has_stored_is_still_there(self):
        for running in self.running:
            for end, tokens, stored in zip(running.allocation.nodes, running.tokens, running.stored, strict=True):
                assert end.depth == stored
                stored_ids = b"".join(node.edge.tobytes() for node in reversed(list(end.path())))
                assert stored_ids == text(*tokens).tokens[:stored].tobytes()

    @invariant()
    def tokens_lie_only_where_their_key_says(self):
        keys = {id(root): key for key, root in self.roots.items()}
        for root in self.policy.index.all():
            for path, _ in walk(root):
                assert any(other[: len(path)] == path for other in self.remembered[keys[id(root)]])


TestIsolated = machine(SpanMachine, layout=staticmethod(isolated))
TestConditioned = machine(SpanMachine, layout=staticmethod(conditioned))
TestAsSeen = machine(SpanMachine, layout=staticmethod(as_seen))
