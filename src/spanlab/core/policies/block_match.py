"""Prefix match of a prompt in a pool of hashed blocks, and the causes of the tokens that are not reused."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.core.ledger import Ledger
from spanlab.core.policies.block_chain import Chain
from spanlab.core.policies.block_groups import AttentionBlocks, StateBlocks
from spanlab.core.policies.block_plan import BlockPlan
from spanlab.core.policies.block_pool import Block, BlockPool
from spanlab.core.policies.block_rules import BlockRules
from spanlab.core.repair import Repair
from spanlab.core.request import Request
from spanlab.core.reuse import Losses

NOTHING_LOST = Losses(0, 0, 0, 0, 0, 0, 0, 0)


class BlockMatcher:
    """Looks up prompts, and caches their digests.

    `ever_stored`  digests at which a state was ever stored
    `kept`         digests of blocks that are stored, or were evicted and no request has missed them since
    """

    def __init__(
        self,
        rules: BlockRules,
        pool: BlockPool,
        attention: AttentionBlocks,
        states: Sequence[StateBlocks],
        ledger: Ledger,
    ) -> None:
        self._rules, self._pool, self._attention, self._states = rules, pool, attention, states
        self._ledger = ledger
        self._chains: dict[int, Chain] = {}
        self.ever_stored: set[int] = set()
        self.kept: set[int] = set()

    def chain(self, request: Request) -> Chain:
        """Return the digests of a request, which are cached until `forget`."""
        chain = self._chains.get(request.id)
        if chain is None or chain.request is not request:  # the same id with its passages in another order
            chain = self._chains[request.id] = Chain(request, self._rules.size)
        return chain

    def forget(self, request: Request) -> None:
        """Drop the cached digests of a request."""
        self._chains.pop(request.id, None)

    def plan(self, request: Request, generated: int) -> BlockPlan:
        """Return the reuse of prompt and output; at least one token is computed."""
        chain, size = self.chain(request), self._rules.size
        prompt = len(chain.prompt)
        length = prompt + generated
        digests = chain.digests_to(length)
        matched = self._attention.find(digests, length // size)
        del matched[chain.count_verified(matched, length) :]
        deepest = self._rules.usable(len(matched))
        limit = self._rules.usable(min(len(matched), (length - 1) // size))
        states, resume = self._find_states(chain, length, limit)
        resumable = resume if limit == deepest else self._find_states(chain, length, deepest)[1]
        junction = limit * size if resume < limit and self._rules.junctions else 0
        seen, losses = length, NOTHING_LOST
        if not generated:
            seen = max(self._ledger.lookup(request.cache_salt, chain.prompt)[0], len(matched) * size)
            losses = self._losses(length, digests, seen, len(matched), resume)
        sizes = seen, len(matched) * size, resumable * size, resume * size
        reused = [matched[:resume], *states]
        return BlockPlan(request, prompt, (), Repair(), *sizes, losses, reused_blocks=reused, junction=junction)

    def _find_states(self, chain: Chain, length: int, limit: int) -> tuple[list[list[Block]], int]:
        """Return the states at the deepest boundary within `limit` blocks that all groups have, and the boundary."""
        while True:
            states = [self._verified_states(group, chain, length, limit) for group in self._states]
            deepest = min((len(blocks) for blocks in states), default=limit)
            if all(len(blocks) == deepest for blocks in states):
                return states, deepest
            limit = deepest

    def _verified_states(self, group: StateBlocks, chain: Chain, length: int, limit: int) -> list[Block]:
        """Return the deepest state of a group that was computed from these tokens, after null blocks."""
        blocks = group.find(chain.digests_to(length), limit)
        while blocks and chain.count_verified(blocks, length) < len(blocks):
            blocks = group.find(chain.digests_to(length), len(blocks) - 1)
        return blocks

    def _losses(self, length: int, digests: Sequence[int], seen: int, matched: int, resume: int) -> Losses:
        size = self._rules.size
        usable = min(seen, length - 1)
        aligned = self._rules.usable(usable // size)
        present = min(self._rules.usable(matched), aligned)
        evicted = (count for count in range(present, resume, -1) if digests[count - 1] in self.ever_stored)
        tombstone = next(evicted, resume) if self._states else present
        missing = aligned - present
        kv_evicted = min(len(self.evicted(digests[matched : usable // size])), missing)
        stored = sum([self._pool.find(0, digest) is not None for digest in digests[matched : usable // size]])
        unreachable = min(stored, missing - kv_evicted)  # behind a block that is missing
        return Losses(
            never_seen=length - seen,
            never_stored=(missing - kv_evicted - unreachable) * size,
            kv_evicted=kv_evicted * size,
            state_evicted=(tombstone - resume) * size,
            state_never_placed=(present - tombstone) * size,
            alignment=usable - (aligned - unreachable) * size,
            last_token=seen - usable,
            locked=0,
        )

    def evicted(self, digests: Sequence[int]) -> list[int]:
        """Return the digests whose blocks were evicted and that no request has missed since."""
        return [digest for digest in digests if digest in self.kept and self._pool.find(0, digest) is None]

    def checkpoints(self, request: Request) -> list[int]:
        """Return the positions of the stored states along a prompt, increasing."""
        if not self._states:
            return []
        digests = Chain(request, self._rules.size).digests  # not cached: the request may have finished
        stored = [all(self._pool.find(group.index, digest) for group in self._states) for digest in digests]
        return [(index + 1) * self._rules.size for index, is_stored in enumerate(stored) if is_stored]
