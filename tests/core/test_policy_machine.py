"""Several requests at once in any order of operations: plans are checked against the contents of the store."""

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from spanlab.core.placement import Union, balanced, branch, every_n, last, no_states
from spanlab.core.plan import ReusePlan, TreeAllocation
from spanlab.core.request import Request

from .factories import BLIND_EVICTIONS, at, common, make_budget, make_dp, make_policy, make_request, states_in, walk
from .machine import RunningRequests, machine, top

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
    """A request with an allocation, in the model of the test."""

    key: tuple
    tokens: tuple[int, ...]
    plan: ReusePlan
    allocation: TreeAllocation
    computed: int


class PolicyMachine(RunningRequests):
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
        running = data.draw(st.sampled_from([r for r in self.running if r.computed < r.plan.prompt]))
        running.computed = data.draw(
            st.integers(running.computed + 1, running.plan.prompt) | st.just(running.plan.prompt)
        )
        allocation, stored, due = running.allocation, running.allocation.stored[0], list(running.allocation.captures)
        self.now += 1
        self.policy.insert(allocation, running.computed, self.now)
        assert not allocation.states
        self.remembered.setdefault(running.key, []).append(running.tokens[: running.computed])
        kept = [] if running.computed == running.plan.prompt else due  # what no insertion took is given back at the end
        stop = running.computed // self.block_size * self.block_size
        stores = self.keeps and stop > stored and (running.computed == running.plan.prompt or not self.private)
        if not stores:
            assert (allocation.stored[0], allocation.captures) == (stored, kept)
        elif allocation.stored[0] == stored:
            assert self.policy.store.budget.entries < 5, "only a budget of entries refuses"
        else:
            self.stored(running, stop, due)

    def stored(self, running, stop, due):
        allocation, root = running.allocation, top(running.allocation.nodes[0])
        assert allocation.stored[0] == allocation.nodes[0].depth == stop
        assert allocation.captures == [position for position in due if position > stop]
        roots = self.roots.setdefault(running.key, [])
        assert self.private or roots in ([], [root]), "one root per salt"
        if root not in roots:
            roots.append(root)
        self.captured.setdefault(running.key, set()).update(running.tokens[:p] for p in due if p <= stop)
        here = {path for path, _ in states_in(root)}
        assert {running.tokens[:p] for p in due if p <= stop} <= here

    # -- oracles ------------------------------------------------------------------------------------------------------

    def examine(self, plan, tokens, key, request):
        """Return every number of a plan, from the tokens and states that are present."""
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

    @invariant()
    def what_an_allocation_has_stored_is_still_there(self):
        for running in self.running:
            paths = {id(node): path for path, node in walk(top(running.allocation.nodes[0]))}
            tokens = paths.get(id(running.allocation.nodes[0]), ())
            assert common(tokens, running.tokens) >= running.allocation.stored[0]

    @invariant()
    def what_is_read_ends_where_computing_resumes(self):
        assert all(
            state.position == running.plan.resume for running in self.running for state in running.allocation.states
        )

    @invariant()
    def states_stand_only_where_one_was_captured(self):
        keys = {id(root): key for key, roots in self.roots.items() for root in roots}
        for root in self.policy.index.all():
            for path, state in states_in(root):
                assert path in self.captured[keys[id(root)]]
                assert len(path) == state.position and state.position % self.unit == 0


TestAttentionShared = machine(PolicyMachine, hybrid=False, private=False)
TestAttentionPrivate = machine(PolicyMachine, hybrid=False, private=True)
TestHybridShared = machine(PolicyMachine, hybrid=True, private=False)
TestHybridPrivate = machine(PolicyMachine, hybrid=True, private=True)
