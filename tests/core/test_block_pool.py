"""A pool of blocks against a slow version with lists."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spanlab.core.policies.block_pool import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Takes, publishes, shares and frees blocks; the queue of published free blocks is modelled as a list."""

    @initialize(blocks=st.integers(1, 6))
    def start(self, blocks):
        self.pool, self.size = BlockPool(blocks), blocks
        self.references = []  # one item per reference
        self.queue = []  # free published blocks, in order of eviction
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
        self.references.append(block)

    @precondition(lambda self: any(block.key is None for block in self.references))
    @rule(data=st.data(), content=st.integers(0, 2), group=st.integers(0, 1))
    def publish(self, data, content, group):
        block = data.draw(st.sampled_from([references for references in self.references if references.key is None]))
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
            self.queue = [free for free in self.queue if free is not block]
        self.pool.use([NULL_BLOCK, block])
        self.references.append(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def free(self, data):
        chosen = data.draw(st.permutations(self.references))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        for block in chosen:
            self.references.remove(block)
        self.pool.free([NULL_BLOCK, *chosen])
        for index, block in enumerate(chosen):
            if block in self.references or block in chosen[index + 1 :]:
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
        assert self.pool.num_free + len(set(self.references)) == self.size
        self.pool.check()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlockPool = PoolMachine.TestCase
