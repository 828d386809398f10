"""A tree with edges of several blocks evicts as a tree with one node per block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.store import recount

from .factories import KV, make_budget, make_store, walk
from .test_tree import encode

BLOCK, ROOM = 2, 6  # tokens, blocks


class PlainTable:
    """Blocks by their prefix, with the time of last use; the oldest block without a successor is evicted."""

    def __init__(self):
        self.used = {}

    def matched(self, tokens):
        return next(n for n in range(len(tokens), -1, -BLOCK) if n == 0 or tokens[:n] in self.used)

    def store(self, tokens, now):
        self.use(tokens, self.matched(tokens), now)
        missing = (len(tokens) - self.matched(tokens)) // BLOCK
        while len(self.used) + missing > ROOM:
            leaves = [key for key in self.used if not any(key == other[:-BLOCK] for other in self.used)]
            del self.used[min(leaves, key=self.used.__getitem__)]
        self.use(tokens, len(tokens), now)

    def use(self, tokens, upto, now):
        self.used |= {tokens[:n]: now for n in range(BLOCK, upto + 1, BLOCK)}


def insert_prompt(store, root, tokens):
    string = encode(tokens)
    node, matched = store.tree.match(root, string)
    store.touch(node, matched)
    missing = (len(tokens) - matched) * KV
    assert store.reserve(missing, 0)
    store.unreserve(missing, 0)
    store.insert(root, string, len(tokens), [], 0)


blocks = st.lists(st.tuples(st.just(0), st.integers(0, 2)), min_size=1, max_size=5).map(lambda pairs: sum(pairs, ()))


@settings(max_examples=120, deadline=None)
@given(st.lists(blocks, max_size=12))
def test_runs_of_blocks_are_evicted_block_by_block(prompts):
    store, table = make_store(make_budget(tokens=ROOM * BLOCK), block_size=BLOCK, fixed_blocks=True), PlainTable()
    root = store.tree.new_root()
    for now, tokens in enumerate(prompts):
        insert_prompt(store, root, tokens)
        table.store(tokens, now)
        ends = [(path, node) for path, node in walk(root)]
        assert {path[:n] for path, _ in ends for n in range(BLOCK, len(path) + 1, BLOCK)} == set(table.used)
        recount(store, [root])


def test_a_long_prompt_is_one_edge_and_loses_its_end():
    store = make_store(make_budget(tokens=8), block_size=BLOCK, fixed_blocks=True)
    root = store.tree.new_root()
    insert_prompt(store, root, (1, 1, 1, 1, 1, 1))
    assert [path for path, _ in walk(root)] == [(1,) * 6]
    insert_prompt(store, root, (2, 2, 2, 2))
    assert sorted(path for path, _ in walk(root)) == [(1,) * 4, (2,) * 4]
