"""Spans of a hybrid model, any order of operations: resumed, captured, locked and reserved tokens, by brute force."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from spanlab.core.placement import PrefillInfo, every_n, last, no_states
from spanlab.core.repair import MapRules, Repair
from spanlab.core.tree import composable

from .factories import (
    BLIND_EVICTIONS,
    KV,
    MAP,
    STATE,
    WORKING_MAP,
    at,
    common,
    make_budget,
    make_map_policy,
    states_in,
    walk,
)
from .machine import machine, top
from .test_span_machine import Running, SpanMachine, pages

budgets = st.builds(
    make_budget,
    tokens=st.none() | st.integers(25, 70),
    states=st.none() | st.integers(3, 12),
    total=st.none() | st.integers(70, 200),
    entries=st.none() | st.integers(2, 6),
)
PLACERS = [every_n(1), every_n(3), last(), at(2, 4, 7), no_states()]


class MapMachine(SpanMachine):
    """As its parent, with a map for every span and states in ordered text."""

    layout = staticmethod(composable)

    @initialize(
        budget=budgets,
        placer=st.sampled_from(PLACERS),
        sizes=st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4), (4, 2), (3, 1)]),
        fixed_blocks=st.booleans(),
        eviction=st.sampled_from(BLIND_EVICTIONS),
        keeps=st.sampled_from([True] * 7 + [False]),
        repair=st.sampled_from([Repair(), Repair("first", k=2)]),
        interval=st.sampled_from([None, None, 1, 2, 3, 4]),
    )
    def build(self, budget, placer, sizes, fixed_blocks, eviction, keeps, repair, interval):
        self.block_size, self.unit, self.placer, self.keeps = sizes[0], max(sizes), placer, keeps
        self.repair, self.copies, self.interval = repair, False, interval
        options = {"fixed_blocks": fixed_blocks, "eviction": eviction, "keeps": keeps, "placer": placer}
        options |= {"repair": repair, "maps": MapRules(interval=interval)}
        self.policy = make_map_policy(budget, block_size=sizes[0], grid=sizes[1], **options)
        self.now, self.running, self.prompts = 0, [], [()]
        self.roots, self.remembered = {}, {}
        self.captured = {}  # key -> beginnings whose state or map was stored at any time

    def key(self, cache_salt, cache_spans, index):
        """A span by its tokens; text with all tokens before it, distinct from every span."""
        return (cache_salt, "span") if cache_spans[index][0] else (cache_salt, "text", *cache_spans[:index])

    # -- operations ---------------------------------------------------------------------------------------------------

    def admit(self, plan, keys, cache_spans, before, generated):
        store = self.policy.store
        tokens = [tokens for _, tokens in cache_spans]
        locked = {name for root in self.policy.index.all() for name in self.locked(root)}
        for part, prompt_tokens in zip(plan.cache_spans, tokens, strict=True):
            locked |= pages(top(part.match_node), prompt_tokens, 0, part.resume, self.block_size)
        states = {id(state): state for one in self.running for state in one.allocation.states}
        states |= {id(part.resume_state): part.resume_state for part in plan.cache_spans if part.resume_state}
        need = plan.prompt - plan.resume + generated
        need += self.repair.private(plan.spans, self.block_size) if self.repair.kind == "first" else 0
        computes = any(
            span and part.resume < len(own) for part, (span, own) in zip(plan.cache_spans, cache_spans, strict=True)
        )
        working = STATE + WORKING_MAP * computes
        kv = (len(locked) * self.block_size + need) * KV + store.kv_reserved
        state = sum(one.num_bytes for one in states.values()) + working + store.state_reserved
        budget = store.budget
        fits = kv <= budget.kv_bytes and state <= budget.state_bytes and kv + state <= budget.total_bytes
        allocation = self.policy.allocate(plan, self.now, generated)
        assert (allocation is not None) == fits
        if allocation is None:
            assert self.snapshot() == before, "a refused admission changed something"
            return
        self.running.append(Running(keys, tokens, plan, allocation, stored=list(allocation.stored)))
        assert (allocation.kv_bytes, allocation.stored) == (need * KV, [part.resume for part in plan.cache_spans])
        self.examine_captures(plan, cache_spans, allocation, working)

    def examine_captures(self, plan, cache_spans, allocation, working):
        """Ends and every interval of spans, and placed positions of text, that are computed; the deepest that fit."""
        expected, start = [], 0
        placed = self.placer.place(PrefillInfo(plan.prompt, 0, 0, 0, ()))
        for part, (span, tokens) in zip(plan.cache_spans, cache_spans, strict=True):
            unit = self.block_size if span else self.unit
            ends = {p - start for p in placed if start < p <= start + len(tokens)}
            if span:
                ends = {p for p in range(1, len(tokens) + 1) if p == len(tokens) or p % (self.interval or p + 1) == 0}
            due = {end // unit * unit for end in ends}
            expected += [(start + p, MAP if span else STATE) for p in sorted(due) if p > part.resume]
            start += len(tokens)
        if not self.keeps:
            expected = []
        count = len(allocation.captures)
        latest = expected[len(expected) - count :]
        assert allocation.captures == [position for position, _ in latest]
        assert allocation.state_bytes == working + sum(size for _, size in latest)
        if count < len(expected):
            assert self.policy.store.spare_state_bytes() < expected[-count - 1][1], "there was room for one more"

    def store(self, running, cache_span, end):
        allocation, cache_span_ = running.allocation, running.plan.cache_spans[cache_span].cache_span
        due, stored, captured = list(allocation.captures), allocation.stored[cache_span], allocation.captured
        super().store(running, cache_span, end)
        if allocation.stored[cache_span] > stored:
            lengths = [
                p - cache_span_.start
                for p in due
                if cache_span_.start < p <= cache_span_.start + allocation.stored[cache_span]
            ]
            known = self.captured.setdefault(running.keys[cache_span], set())
            known.update(running.tokens[cache_span][:length] for length in lengths)
            captured += len(lengths)
        assert allocation.captured == captured
        if end >= running.plan.prompt:
            assert (allocation.states, allocation.captures, allocation.working_map) == ([], [], 0)
            assert allocation.state_bytes == STATE
        else:
            assert allocation.states == running.plan.states, "what was read stays locked until the prompt is computed"

    # -- oracles ------------------------------------------------------------------------------------------------------

    def examine(self, plan, keys, cache_spans):
        """Every cache span by itself: from its deepest state or map within what is stored and may be reused."""
        for at_, (part, key, (span, tokens)) in enumerate(zip(plan.cache_spans, keys, cache_spans, strict=True)):
            assert (part.cache_span.independent, part.twin) == (span, None)
            root = self.roots.get(key)
            paths = [path for path, _ in walk(root)] if root is not None else []
            states = [path for path, _ in states_in(root)] if root is not None else []
            matched = max((common(path, tokens) for path in paths), default=0) // self.block_size * self.block_size
            limit = len(tokens) - (at_ == len(cache_spans) - 1)
            lengths = [len(path) for path in states if path == tokens[: len(path)]]
            assert part.matched == matched
            assert part.resume == max((n for n in lengths if n <= min(matched, limit)), default=0)
            assert part.resumable == max((n for n in lengths if n <= matched), default=0)
            assert part.seen == max([matched, *(common(tokens, other) for other in self.remembered.get(key, []))])
            assert sum(part.losses) + part.resume == len(tokens)
            assert min(part.losses) >= 0
            assert part.resume_state is None or part.resume_state.num_bytes == (MAP if span else STATE)
        assert plan.reused + sum(plan.losses) == plan.prompt

    @invariant()
    def states_weigh_what_they_are_and_stand_where_one_was_captured(self):
        keys = {id(root): key for key, root in self.roots.items()}
        for root in self.policy.index.all():
            for path, state in states_in(root):
                key = keys[id(root)]
                unit, size = (self.block_size, MAP) if key[1] == "span" else (self.unit, STATE)
                assert path in self.captured[key]
                assert state.num_bytes == size
                assert len(path) == state.position and state.position % unit == 0


TestMaps = machine(MapMachine)
del SpanMachine  # its own cases are in the module that it comes from
