"""A pool of blocks against a list that does the same slowly."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spanlab.core.policies.block_pool import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Takes, publishes, shares and frees; the queue is modelled as one plain list of keys."""

    @initialize(blocks=st.integers(1, 6))
    def start(self, blocks):
        self.pool, self.size = BlockPool(blocks), blocks
        self.held = []  # (block, users)
        self.queue = []  # keys of free findable blocks, next to leave first
        self.without_key = blocks

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def take(self):
        (block,) = self.pool.take(1)
        if self.without_key:
            self.without_key -= 1
        else:
            self.queue.pop(0)
        assert block.key is None and block.users == 1
        self.held.append(block)

    @precondition(lambda self: any(block.key is None for block in self.held))
    @rule(data=st.data(), content=st.integers(0, 2), group=st.integers(0, 1))
    def publish(self, data, content, group):
        block = data.draw(st.sampled_from([one for one in self.held if one.key is None]))
        first = self.pool.find(group, content)
        self.pool.publish(group, [block], [content])
        assert block.key == (group, content)
        assert self.pool.find(group, content) is (first or block), "the first published block is found"

    @rule(content=st.integers(0, 2), group=st.integers(0, 1))
    def share(self, content, group):
        block = self.pool.find(group, content)
        if block is None:
            return
        if block.users == 0:
            self.queue = [one for one in self.queue if one is not block]
        self.pool.use([NULL_BLOCK, block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        chosen = data.draw(st.permutations(self.held))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        for block in chosen:
            self.held.remove(block)
        self.pool.free([NULL_BLOCK, *chosen])
        for at, block in enumerate(chosen):
            if block in self.held or block in chosen[at + 1 :]:
                continue
            if block.key is None:
                self.without_key += 1
            else:
                self.queue.append(block)

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        assert list(self.pool.waiting()) == self.queue
        assert self.pool.num_free == self.without_key + len(self.queue)
        assert self.pool.num_free + len(set(self.held)) == self.size
        self.pool.check()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlockPool = PoolMachine.TestCase
