"""Stored KV after evicted KV occurs in a pool of chunks, but never in a pool of blocks."""

from collections.abc import Iterator
from itertools import count

import pytest

from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.chunks import ChunkPolicy
from spanlab.core.protocol import SharedPolicy
from spanlab.core.request import Request, Span

from .clients import DOCUMENTS, Client

POLICIES = {
    "blocks": lambda store: BlockPolicy(BlockRules(4), store),
    "align": lambda store: BlockPolicy(BlockRules(4, "align"), store),
    "retention": lambda store: BlockPolicy(BlockRules(4, "align", 1, 8), store),
    "chunks": lambda store: ChunkPolicy(BlockRules(4), store),
}


def holes(policy: BlockPolicy, requests: list[Request]) -> Iterator[int]:
    """Yield the number of blocks of each document that are stored behind a missing one."""
    pool = policy.store.pool
    for request in requests:
        digests = policy._matcher.chain(request).digests_to(request.num_tokens)
        blocks = request.num_tokens // 4
        yield pool.count_behind(0, digests, 0, blocks)[0] - pool.find_run(0, digests, 0, blocks).count


@pytest.mark.parametrize("name", POLICIES)
def test_only_a_pool_of_chunks_has_holes(name):
    policy = POLICIES[name](BlockStore(BlockPool(60), 1, 1))
    documents = [Request(-1 - number, 0, (Span(tokens),), 1, cache_salt="a") for number, tokens in enumerate(DOCUMENTS)]
    num_holes = 0
    for most in (1, 6):
        client = Client(SharedPolicy(policy), most, most, count(most * 10_000), count(most * 10_000))
        for _ in range(600):
            client.act()
            num_holes += sum(holes(policy, documents))
        client.end()
    assert (num_holes > 0) == (name == "chunks")
    assert sum(policy.store.pool.num_evicted.values()) > 100
