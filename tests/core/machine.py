"""Operations and checks of every state machine over a policy, for any kind of prompts."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from .factories import KV, assert_drained, assert_within_budget, counters, states_in, walk


def top(node):
    """The root above a node."""
    while node.parent is not None:
        node = node.parent
    return node


def machine(case: type[RuleBasedStateMachine], **options: Any):
    """The test case of a machine with these class attributes."""
    test = type(case.__name__, (case,), options).TestCase
    test.settings = settings(deadline=None, max_examples=50, stateful_step_count=40)
    return test


class RunningRequests(RuleBasedStateMachine):
    """Requests that hold allocations grow, finish and give up; a subclass builds `policy`, admits and computes."""

    policy: Any
    running: list[Any]  # each with its plan and its allocation

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def decode(self, data, tokens):
        allocation = data.draw(st.sampled_from(self.running)).allocation
        before, reserved_to = self.snapshot(), allocation.reserved_to
        is_enough = self.policy.store.spare_tokens() >= tokens
        assert self.policy.append(allocation, reserved_to, reserved_to + tokens) == is_enough
        assert is_enough or self.snapshot() == before, "a refused growth changed something"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_or_give_up(self, data):
        running = data.draw(st.sampled_from(self.running))
        self.running.remove(running)
        self.policy.free(running.allocation, 0)

    def teardown(self):
        if not hasattr(self, "policy"):
            return
        for running in self.running:
            self.policy.free(running.allocation, 0)
        assert_drained(self.policy)
        self.policy.check()
        store = self.policy.store
        if store.budget.total_bytes >= store.budget.kv_bytes:  # everything may leave now
            assert store.reserve(store.budget.kv_bytes, 0)
            assert store.kv_cached == 0 or store.budget.kv_bytes > 1 << 60
            self.policy.check()

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
        store, allocations = self.policy.store, [running.allocation for running in self.running]
        assert store.kv_reserved == sum(allocation.kv_bytes for allocation in allocations)
        assert store.state_reserved == sum(allocation.state_bytes for allocation in allocations)
        assert all(allocation.kv_bytes >= 0 and allocation.state_bytes >= 0 for allocation in allocations)

    @invariant()
    def locks_are_those_of_the_allocations_and_what_is_locked_is_there(self):
        locks, state_locks = {}, {}
        for running in self.running:
            for node in [node for end in running.allocation.nodes for node in end.path()]:
                assert node.parent.children[node.key] is node, "a locked node has left"
                locks[id(node)] = locks.get(id(node), 0) + 1
            for state in running.allocation.states:
                assert state.node is not None, "a locked state has left"
                state_locks[id(state)] = state_locks.get(id(state), 0) + 1
        protected = protected_states = 0
        for root in self.policy.index.all():
            for _, node in walk(root):
                assert node.locks == locks.get(id(node), 0)
                protected += (node.depth - node.start) * KV if node.locks else 0
            for _, state in states_in(root):
                assert state.locks == state_locks.get(id(state), 0)
                protected_states += state.num_bytes if state.locks else 0
        assert self.policy.store.kv_locked == protected
        assert self.policy.store.state_locked == protected_states
