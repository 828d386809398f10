"""What a prompt finds in a pool of hashed blocks at this moment, and what the rest of it is lost to."""

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
    """Looks up prompts, and keeps their digests.

    `ever_stored`  digests at which a state was ever kept
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

    def chain(self, request: Request) -> Chain:
        """Digests of a request, kept until it is forgotten."""
        chain = self._chains.get(request.id)
        if chain is None or chain.request is not request:  # its passages may be asked about in another order
            chain = self._chains[request.id] = Chain(request, self._rules.size)
        return chain

    def forget(self, request: Request) -> None:
        """Drop the digests of a request that holds nothing any more."""
        self._chains.pop(request.id, None)

    def plan(self, request: Request, generated: int) -> BlockPlan:
        """How much of prompt and output can be reused; at least one token is computed."""
        known, size = self.chain(request), self._rules.size
        prompt = len(known.prompt)
        length = prompt + generated
        chain = known.upto(length)
        matched = self._attention.find(chain, length // size)
        del matched[known.agrees_to(matched, length) :]
        deepest = self._rules.usable(len(matched))
        limit = self._rules.usable(min(len(matched), (length - 1) // size))
        states, resume = self._find_states(known, length, limit)
        resumable = resume if limit == deepest else self._find_states(known, length, deepest)[1]
        junction = limit * size if resume < limit and self._rules.junctions else 0
        seen, losses = length, NOTHING_LOST
        if not generated:
            seen = max(self._ledger.known(request.cache_salt, known.prompt)[0], len(matched) * size)
            losses = self._losses(length, chain, seen, len(matched), resume)
        sizes = seen, len(matched) * size, resumable * size, resume * size
        found = [matched[:resume], *states]
        return BlockPlan(request, prompt, (), Repair(), *sizes, losses, found=found, junction=junction)

    def _find_states(self, known: Chain, length: int, limit: int) -> tuple[list[list[Block]], int]:
        """The deepest boundary within `limit` blocks at which every group of states has one."""
        while True:
            found = [self._own_states(group, known, length, limit) for group in self._states]
            deepest = min((len(blocks) for blocks in found), default=limit)
            if all(len(blocks) == deepest for blocks in found):
                return found, deepest
            limit = deepest

    def _own_states(self, group: StateBlocks, known: Chain, length: int, limit: int) -> list[Block]:
        """The deepest state of a group that was computed from these tokens."""
        found = group.find(known.upto(length), limit)
        while found and known.agrees_to(found, length) < len(found):
            found = group.find(known.upto(length), len(found) - 1)
        return found

    def _losses(self, length: int, chain: Sequence[int], seen: int, matched: int, resume: int) -> Losses:
        size = self._rules.size
        usable = min(seen, length - 1)
        aligned = self._rules.usable(usable // size)
        present = min(self._rules.usable(matched), aligned)
        stored = (at for at in range(present, resume, -1) if chain[at - 1] in self.ever_stored)
        tombstone = next(stored, resume) if self._states else present
        return Losses(
            never_seen=length - seen,
            never_stored=0,
            kv_evicted=(aligned - present) * size,
            state_evicted=(tombstone - resume) * size,
            state_never_placed=(present - tombstone) * size,
            alignment=usable - aligned * size,
            last_token=seen - usable,
            locked=0,
        )

    def checkpoints(self, request: Request) -> list[int]:
        """Positions of the states that are stored along a prompt, increasing."""
        if not self._states:
            return []
        digests = Chain(request, self._rules.size).digests  # that of a request is gone once it has ended
        stored = [all(self._pool.find(group.index, digest) for group in self._states) for digest in digests]
        return [(at + 1) * self._rules.size for at, there in enumerate(stored) if there]
