"""The forest of prefixes against a plain set of token tuples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spanlab.core.token_string import TokenString, string_of
from spanlab.core.tree import PrefixTree, State

from .factories import common, states_in, walk
from .machine import machine

SHAPES = [(1, False), (1, True), (4, False), (4, True)]
letters = st.lists(st.integers(0, 1), max_size=14)


def encode(tokens) -> TokenString:
    return string_of([np.array(tokens, np.int32)])


def insert(tree: PrefixTree, root, tokens):
    """Store the whole blocks of `tokens`."""
    return tree.extend(root, encode(tokens), len(tokens) // tree.block_size * tree.block_size, 0)


class TreeMachine(RuleBasedStateMachine):
    """Grows, cuts and prunes one tree; `stored` is the set of stored prefixes, whole blocks only."""

    block_size, fixed_blocks = 1, False

    def __init__(self):
        super().__init__()
        self.tree = PrefixTree(self.block_size, self.fixed_blocks)
        self.root = self.tree.new_root()
        self.known = [()]
        self.stored = {()}
        self.states = {}
        self.lost = set()

    def prompt(self, data, suffix):
        """A new prompt that likes to begin as an earlier one did."""
        base = data.draw(st.sampled_from(self.known))
        tokens = base[: data.draw(st.integers(0, len(base)))] + tuple(suffix)
        self.known.append(tokens)
        return tokens

    def longest(self, tokens) -> int:
        return max(n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in self.stored)

    @rule(data=st.data(), suffix=letters)
    def match_equals_the_longest_stored_prefix(self, data, suffix):
        tokens = self.prompt(data, suffix)
        node, length = self.tree.match(self.root, encode(tokens))
        assert length == self.longest(tokens)
        assert node.start < length <= node.depth or (node is self.root and length == 0)
        paths = {id(node): path for path, node in walk(self.root)} | {id(self.root): ()}
        assert common(paths[id(node)], tokens) // self.block_size * self.block_size == length

    @rule(data=st.data(), suffix=letters)
    def extend_adds_what_is_missing_and_ends_at_a_node(self, data, suffix):
        tokens = self.prompt(data, suffix)
        stop = data.draw(st.integers(0, len(tokens) // self.block_size)) * self.block_size
        missing = stop - min(stop, self.longest(tokens))
        start = self.root
        if data.draw(st.booleans()):  # from a node on the way, as a chunk does
            on_the_way = [n for path, n in walk(self.root) if path == tokens[: len(path)] and n.depth <= stop]
            start = data.draw(st.sampled_from([self.root, *on_the_way]))
        before = self.tree.num_tokens
        end = self.tree.extend(start, encode(tokens), stop, 0)
        assert (end.depth, self.tree.num_tokens - before) == (stop, missing)
        self.stored |= {tokens[:n] for n in range(0, stop + 1, self.block_size)}
        if stop:
            position = (
                data.draw(st.integers(end.start // self.block_size + 1, stop // self.block_size)) * self.block_size
            )
            if tokens[:position] not in self.states:
                self.states[tokens[:position]] = state = State(position, end, 0, 0, 1)
                end.states = sorted([*end.states, state], key=lambda stored: stored.position)
            else:  # the state there is evicted, and recorded as such
                state = self.states.pop(tokens[:position])
                end.states.remove(state)
                end.lost = sorted({*end.lost, position})
                self.lost.add(tokens[:position])

    @rule(data=st.data(), suffix=letters)
    def match_from_a_node_equals_match_from_the_root(self, data, suffix):
        tokens = self.prompt(data, suffix)
        for path, node in walk(self.root):
            if path == tokens[: len(path)]:
                assert self.tree.match(node, encode(tokens)) == self.tree.match(self.root, encode(tokens))

    @precondition(lambda self: self.root.children)
    @rule(data=st.data())
    def remove_takes_one_leaf_and_nothing_else(self, data):
        path, leaf = data.draw(st.sampled_from([pair for pair in walk(self.root) if not pair[1].children]))
        parent = leaf.parent
        assert self.tree.remove(leaf) is parent
        self.stored -= {path[:n] for n in range(leaf.start + 1, leaf.depth + 1)}
        for n in range(leaf.start + 1, leaf.depth + 1):
            self.states.pop(path[:n], None)
            self.lost.discard(path[:n])

    @invariant()
    def the_nodes_are_the_stored_prefixes(self):
        prefixes = {()}
        for path, node in walk(self.root):
            assert len(path) == node.depth
            assert node.depth % self.block_size == 0
            prefixes |= {path[:n] for n in range(node.start + self.block_size, node.depth + 1, self.block_size)}
        assert prefixes == self.stored

    @rule(data=st.data(), suffix=letters, limit=st.integers(0, 16), above=st.integers(0, 16))
    def the_deepest_state_and_the_deepest_loss_are_those_of_the_prompt(self, data, suffix, limit, above):
        tokens = self.prompt(data, suffix)
        node, length = self.tree.match(self.root, encode(tokens))
        limit = min(limit, length)
        prefixes = [tokens[:n] for n in range(limit, 0, -1)]
        assert node.deepest_state(limit) is next((self.states[p] for p in prefixes if p in self.states), None)
        deepest = max((len(p) for p in prefixes if p in self.lost and len(p) > above), default=above)
        assert node.deepest_loss(above, limit) == deepest

    @invariant()
    def states_and_losses_stay_at_their_positions_whatever_is_cut(self):
        assert dict(states_in(self.root)) == self.states
        assert {path[:n] for path, node in walk(self.root) for n in node.lost} == self.lost
        for path, node in walk(self.root):
            assert all(state.node is node for state in node.states)
            for positions in ([state.position for state in node.states], node.lost):
                assert positions == sorted(positions)
                assert all(node.start < n <= len(path) for n in positions)

    @invariant()
    def tokens_and_leaves_are_counted(self):
        assert self.tree.num_tokens == (len(self.stored) - 1) * self.block_size
        assert self.tree.num_leaves == sum(not node.children for _, node in walk(self.root))

    @invariant()
    def siblings_differ_in_their_first_page(self):
        for node in [self.root, *(node for _, node in walk(self.root))]:
            firsts = [child.edge.key(0, self.block_size) for child in node.children.values()]
            assert list(node.children) == firsts
            assert all(child.parent is node and child.start == node.depth for child in node.children.values())


TestRadixTree = machine(TreeMachine)
TestTokenTable = machine(TreeMachine, fixed_blocks=True)
TestPagedRadixTree = machine(TreeMachine, block_size=4)
TestBlockTable = machine(TreeMachine, block_size=4, fixed_blocks=True)

batches = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=8)


@pytest.mark.parametrize(("block_size", "fixed_blocks"), SHAPES)
@settings(deadline=None, max_examples=60)
@given(sequences=batches, data=st.data())
def test_the_order_of_insertion_changes_nothing(block_size, fixed_blocks, sequences, data):
    nodes = []
    for order in (sequences, data.draw(st.permutations(sequences))):
        tree = PrefixTree(block_size, fixed_blocks)
        root = tree.new_root()
        for tokens in order:
            insert(tree, root, tokens)
        nodes.append({path for path, _ in walk(root)})
    assert nodes[0] == nodes[1]


def test_a_split_keeps_identity_and_state_positions():
    tree = PrefixTree()
    root = tree.new_root()
    lower = insert(tree, root, [1, 2, 3, 4])
    states = [State(position, lower, serial, 0, 1) for serial, position in enumerate((1, 2, 3, 4))]
    lower.states, lower.lost, lower.locks, lower.used, lower.uses = [states[1], states[3]], [1, 3], 2, 5, 3
    branch = insert(tree, root, [1, 2, 9])
    upper = lower.parent
    assert (upper.start, upper.depth, upper.locks, upper.uses) == (0, 2, 2, 3)
    assert upper.used == lower.used == 0, "both parts count as used when the edge is cut"
    assert (upper.states, upper.lost) == ([states[1]], [1])
    assert (lower.start, lower.depth, lower.locks, lower.uses) == (2, 4, 2, 3)
    assert (lower.states, lower.lost) == ([states[3]], [3])
    assert (states[1].node, states[3].node) == (upper, lower)
    assert (branch.start, branch.depth, branch.locks, branch.states) == (2, 3, 0, [])
    assert list(lower.path()) == [lower, upper]
    assert (tree.num_tokens, tree.num_leaves) == (5, 2)


def test_an_inner_node_cannot_be_removed():
    tree = PrefixTree()
    root = tree.new_root()
    insert(tree, root, [1, 2])
    insert(tree, root, [1, 2, 3])
    inner = next(iter(root.children.values()))
    with pytest.raises(AssertionError, match="only leaves are removed"):
        tree.remove(inner)
