"""Several requests at once, any order of operations: everything the policy says is checked against what is there."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spanlab.core.placement import Union, balanced, branch, every_n, last, no_states
from spanlab.core.request import Request
from spanlab.core.reuse import ReusePlan, TreeAllocation

from .factories import (
    BLIND_EVICTIONS,
    KV,
    STATE,
    assert_drained,
    assert_within_budget,
    at,
    common,
    counters,
    make_budget,
    make_dp,
    make_policy,
    make_request,
    states_in,
    walk,
)

budgets = st.builds(
    make_budget,
    tokens=st.none() | st.integers(10, 60),
    states=st.none() | st.integers(1, 9),
    total=st.none() | st.integers(30, 160),
    entries=st.none() | st.integers(1, 4),
)
placers = st.sampled_from(
    [
        lambda grid: every_n(grid),
        lambda grid: every_n(3),
        lambda grid: at(2, 5, 8, 11),
        lambda grid: last(),
        lambda grid: Union((branch(), last())),
        lambda grid: balanced(2),
        lambda grid: no_states(),
        lambda grid: make_dp(2, grid=grid, max_tokens=16, warmup=2, update="decayed", every=3, decay=0.9),
    ]
)


@dataclass
class Running:
    """A request that holds an allocation, as the test knows it."""

    key: tuple
    tokens: tuple[int, ...]
    plan: ReusePlan
    allocation: TreeAllocation
    computed: int


def top(node):
    """The root above a node."""
    while node.parent is not None:
        node = node.parent
    return node


class PolicyMachine(RuleBasedStateMachine):
    """Matches, allocates, inserts chunks, appends and frees; `hybrid` and `private` are fixed by the subclass."""

    hybrid, private = False, False

    @initialize(
        budget=budgets,
        placer=placers,
        grid=st.sampled_from([1, 2, 4]),
        block_size=st.sampled_from([1, 1, 2, 4]),
        fixed_blocks=st.booleans(),
        eviction=st.sampled_from(BLIND_EVICTIONS),
        last_token=st.sampled_from([False, False, False, True]),
        keeps=st.sampled_from([True] * 7 + [False]),
    )
    def build(self, budget, placer, grid, block_size, fixed_blocks, eviction, last_token, keeps):
        self.policy = make_policy(
            budget,
            hybrid=self.hybrid,
            placer=placer(grid),
            grid=grid,
            block_size=block_size,
            fixed_blocks=fixed_blocks,
            eviction=eviction,
            private=self.private,
            last_token=last_token,
            keeps=keeps,
        )
        self.block_size, self.unit = block_size, max(block_size, grid) if self.hybrid else block_size
        self.last_token, self.keeps = last_token, keeps
        self.now, self.running, self.prompts = 0, [], [()]
        self.roots = {}  # key -> roots in the order of their first insertion
        self.remembered = {}  # key -> prompts, as far as they were computed
        self.captured = {}  # key -> prefixes at whose end a state was stored, ever

    # -- operations ---------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        suffix=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        cache_salt=st.sampled_from(["", "", "x"]),
    )
    def start(self, data, suffix, cache_salt):
        base = data.draw(st.sampled_from(self.prompts))
        tokens = (base[: data.draw(st.integers(0, len(base)))] + tuple(suffix))[:16]
        self.prompts.append(tokens)
        request = make_request(tokens, group=data.draw(st.integers(0, 1)), cache_salt=cache_salt)
        self.now += 1
        before = self.snapshot()
        plan = self.policy.match(request, self.now)
        assert self.snapshot() == before, "planning changed something"
        key = (cache_salt, request.group_id if self.private else 0)
        self.examine(plan, tokens, key, request)
        allocation = self.policy.allocate(plan, self.now)
        if allocation is None:
            assert self.snapshot() == before, "a refused admission changed something"
            return
        assert allocation.captures == sorted(set(allocation.captures))
        least = 0 if self.private else plan.resume
        assert all(least < p <= plan.prompt and p % self.unit == 0 for p in allocation.captures)
        assert (self.hybrid and self.keeps) or not allocation.captures
        self.running.append(Running(key, tokens, plan, allocation, plan.resume))

    @precondition(lambda self: any(r.computed < r.plan.prompt for r in self.running))
    @rule(data=st.data())
    def compute(self, data):
        one = data.draw(st.sampled_from([r for r in self.running if r.computed < r.plan.prompt]))
        one.computed = data.draw(st.integers(one.computed + 1, one.plan.prompt) | st.just(one.plan.prompt))
        allocation, stored, due = one.allocation, one.allocation.stored[0], list(one.allocation.captures)
        self.now += 1
        self.policy.insert(allocation, one.computed, self.now)
        assert not allocation.states
        self.remembered.setdefault(one.key, []).append(one.tokens[: one.computed])
        kept = [] if one.computed == one.plan.prompt else due  # what no insertion took is given back at the end
        stop = one.computed // self.block_size * self.block_size
        wanted = self.keeps and stop > stored and (one.computed == one.plan.prompt or not self.private)
        if not wanted:
            assert (allocation.stored[0], allocation.captures) == (stored, kept)
        elif allocation.stored[0] == stored:
            assert self.policy.store.budget.entries < 5, "only a budget of entries refuses"
        else:
            self.stored(one, stop, due)

    def stored(self, one, stop, due):
        allocation, root = one.allocation, top(one.allocation.nodes[0])
        assert allocation.stored[0] == allocation.nodes[0].depth == stop
        assert allocation.captures == [position for position in due if position > stop]
        roots = self.roots.setdefault(one.key, [])
        assert self.private or roots in ([], [root]), "one root per salt"
        if root not in roots:
            roots.append(root)
        self.captured.setdefault(one.key, set()).update(one.tokens[:p] for p in due if p <= stop)
        here = {path for path, _ in states_in(root)}
        assert {one.tokens[:p] for p in due if p <= stop} <= here

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def decode(self, data, tokens):
        allocation = data.draw(st.sampled_from(self.running)).allocation
        before, held = self.snapshot(), allocation.reserved_to
        fits = self.policy.store.spare_tokens() >= tokens
        assert self.policy.append(allocation, held, held + tokens) == fits
        assert fits or self.snapshot() == before, "a refused growth changed something"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_or_give_up(self, data):
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.policy.free(one.allocation, 0)

    def teardown(self):
        if not hasattr(self, "policy"):
            return
        for one in self.running:
            self.policy.free(one.allocation, 0)
        assert_drained(self.policy)
        self.policy.check()
        store = self.policy.store
        if store.budget.total_bytes >= store.budget.kv_bytes:  # everything may leave now
            assert store.reserve(store.budget.kv_bytes, 0)
            assert store.kv_cached == 0 or store.budget.kv_bytes > 1 << 60
            self.policy.check()

    # -- oracles ------------------------------------------------------------------------------------------------------

    def examine(self, plan, tokens, key, request):
        """Every number of a plan, from the tokens and states that are present."""
        roots = self.roots.get(key, [])
        reach = [
            max((common(path, tokens) // self.block_size * self.block_size for path, _ in walk(root)), default=0)
            for root in roots
        ]
        matched = max(reach, default=0)
        limit = len(tokens) if self.last_token else len(tokens) - 1
        oldest = roots[reach.index(matched)] if matched else None
        states = [
            len(path)
            for path, _ in (states_in(oldest) if oldest else [])
            if path == tokens[: len(path)] and len(path) <= matched
        ]
        if self.hybrid:
            resume = max((p for p in states if p <= limit), default=0)
            resumable = max(states, default=0)
        else:
            resume, resumable = (min(matched, bound) // self.block_size * self.block_size for bound in (limit, matched))
        assert oldest is None or top(plan.cache_spans[-1].match_node) is oldest, "not the oldest of the longest"
        assert (plan.prompt, plan.matched, plan.resume) == (len(tokens), matched, resume)
        # what may be restarted from, had the last token not to be computed
        assert plan.resumable == resumable
        assert plan.seen == max([matched, *(common(tokens, other) for other in self.remembered.get(key, []))])
        assert plan.resume <= min(plan.matched, limit)
        assert plan.resume % self.unit == 0
        assert not self.hybrid or resume == 0 or tokens[:resume] in self.captured[key]
        assert sum(plan.losses) + plan.resume == plan.prompt
        assert all(loss >= 0 for loss in plan.losses)
        assert isinstance(request, Request)

    def snapshot(self):
        """All that the store holds and counts."""
        nodes = [
            (
                *(path, node.locks, tuple(node.lost), node.created, node.used, node.uses),
                tuple((state.position, state.locks, state.created, state.used, state.uses) for state in node.states),
            )
            for root in self.policy.index.all()
            for path, node in walk(root)
        ]
        return counters(self.policy.store), sorted(nodes)

    @invariant()
    def the_recount_agrees_and_no_budget_is_exceeded(self):
        self.policy.check()
        assert_within_budget(self.policy.store)

    @invariant()
    def reservations_are_those_of_the_allocations(self):
        store = self.policy.store
        assert store.kv_reserved == sum(one.allocation.kv_bytes for one in self.running)
        assert store.state_reserved == sum(one.allocation.state_bytes for one in self.running)

    @invariant()
    def locks_are_those_of_the_allocations_and_what_is_locked_is_there(self):
        locks, state_locks = {}, {}
        for one in self.running:
            for node in one.allocation.nodes[0].path():
                assert node.parent.children[node.key] is node, "a locked node has left"
                locks[id(node)] = locks.get(id(node), 0) + 1
            for state in one.allocation.states:
                assert state.node is not None and state.position == one.plan.resume, "a locked state has left"
                state_locks[id(state)] = state_locks.get(id(state), 0) + 1
        protected = 0
        for root in self.policy.index.all():
            for _, node in walk(root):
                assert node.locks == locks.get(id(node), 0)
                protected += (node.depth - node.start) * KV if node.locks else 0
            assert all(state.locks == state_locks.get(id(state), 0) for _, state in states_in(root))
        assert self.policy.store.kv_locked == protected
        assert self.policy.store.state_locked == len(state_locks) * STATE

    @invariant()
    def what_an_allocation_has_stored_is_still_there(self):
        for one in self.running:
            paths = {id(node): path for path, node in walk(top(one.allocation.nodes[0]))}
            tokens = paths.get(id(one.allocation.nodes[0]), ())
            assert common(tokens, one.tokens) >= one.allocation.stored[0]

    @invariant()
    def states_stand_only_where_one_was_captured(self):
        known = {id(root): key for key, roots in self.roots.items() for root in roots}
        for root in self.policy.index.all():
            for path, state in states_in(root):
                assert path in self.captured[known[id(root)]]
                assert len(path) == state.position and state.position % self.unit == 0


def machine(name: str, **options):
    """The machine's test case for one kind of model and one way of sharing."""
    case = type(name, (PolicyMachine,), options).TestCase
    case.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
    return case


TestAttentionShared = machine("AttentionShared", hybrid=False, private=False)
TestAttentionPrivate = machine("AttentionPrivate", hybrid=False, private=True)
TestHybridShared = machine("HybridShared", hybrid=True, private=False)
TestHybridPrivate = machine("HybridPrivate", hybrid=True, private=True)
