"""Bars of a dense prefix cache: lookups, metadata, and what LRU keeps where the working set fits.

    .venvs/sim/bin/python benchmarks/must_hold/dense.py

Writes `dense.json` and the table `dense.md` beside this file. Lookups are timed one by one in a tree of 10,000 nodes
and 10 million tokens, in seconds of one processor. The share of metadata is Python's memory of the tree beside the KV
that it stands for, by block size, next to that of a table of block digests; ids of tokens are not counted. Hits are
those of a radix tree under LRU, up to 16 requests at once, as a share of what an infinite cache finds; the working set
is all that the window asks for.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measure import below, random_tokens
from measurements import facts, timed, write_results
from pages import table

from spanlab.core.admission import BatchRules
from spanlab.core.placement import no_states
from spanlab.core.policies.block_pool import BlockRules, BlockShape, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Budget, Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.scheduler import Scheduler
from spanlab.core.store import Store
from spanlab.core.token_string import TokenString, string_of
from spanlab.core.tree import PrefixTree, SharedIndex

NODES, TOKENS = 10_000, 10_000_000
KV = 131_072  # bytes per token of an 8B model in 16 bits with 8 KV heads
AT_ONCE = 16


def asked_about(rng: np.random.Generator, length: int) -> tuple[list[TokenString], list[TokenString]]:
    """Documents of one length, and questions about the first part of one each; most tokens lie in documents."""
    documents = [random_tokens(rng, length) for _ in range(round(0.8 * TOKENS / length))]
    tails, prompts = (NODES - len(documents)) // 2, []
    for _ in range(tails):
        document = documents[int(rng.integers(len(documents)))]
        prompts.append(document.cut(0, int(rng.integers(1, length))) + random_tokens(rng, TOKENS // (5 * tails)))
    return documents, [*documents, *prompts]


def lookups(query: int, times: int = 5_000) -> dict[str, float]:
    """Milliseconds of the processor for lookups of documents and a tail; `query` tokens, of which nearly all match."""
    rng = np.random.default_rng(0)
    documents, prompts = asked_about(rng, query - 64)
    tree = PrefixTree()
    root = tree.new_root()
    for prompt in prompts:
        tree.extend(root, prompt, len(prompt), 0)
    picked = rng.integers(0, len(documents), times)
    texts = [np.frombuffer(one.tobytes(), np.int32) for one in documents]  # arrays of their own: tokens are compared
    asked = (string_of([texts[at]]) + random_tokens(rng, 64) for at in picked)
    found = [(timed(partial(tree.match, root, one), time.thread_time), tree.match(root, one)) for one in asked]
    p50, p99 = (float(np.percentile([took for took, _ in found], at)) * 1e3 for at in (50, 99))
    return {
        "nodes": len(below(root)),
        "tokens": tree.num_tokens,
        "nodes_on_path": float(np.mean([sum(1 for _ in node.path()) for _, (node, _) in found])),
        "tokens_matched": float(np.mean([matched for _, (_, matched) in found])),
        "p50_ms": p50,
        "p99_ms": p99,
    }


def metadata(block_size: int) -> dict[str, float]:
    """Bytes of a tree, and of a table of digests, that hold the same prompts; token ids themselves are not counted."""
    rng = np.random.default_rng(1)
    prompts = asked_about(rng, 8_192)[1]
    tracemalloc.start()
    tree = PrefixTree(block_size)
    root = tree.new_root()
    for prompt in prompts:
        tree.extend(root, prompt, len(prompt) // block_size * block_size, 0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    nodes, payload = len(below(root)), tree.num_tokens * KV
    requests = [Request(at, 0, (Span(np.frombuffer(one.tobytes(), np.int32)),)) for at, one in enumerate(prompts)]
    tracemalloc.start()
    shape = BlockShape(block_size, block_size * KV, 0)
    table = BlockPolicy(BlockRules(block_size), BlockStore(shape.pool(1 << 50), shape.block_bytes, 0))
    for request in requests:
        allocation = table.allocate(table.match(request, 0), 0)
        assert allocation is not None and table.append(allocation, 0, request.num_tokens)
        table.free(allocation, 0)
    hashed = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "nodes": nodes,
        "nodes_per_insert": nodes / len(prompts),
        "bytes_per_node": held / nodes,
        "share_of_kv": held / payload,
        "table_share_of_kv": hashed / payload,
    }


@dataclass
class Kept:
    """Tokens of prompts and those found, and bytes that came and left."""

    asked: int = 0
    found: int = 0
    inserted: int = 0
    evicted: int = 0


def served(requests: Iterable[Request], budget: int) -> Kept:
    """A radix tree under LRU with a budget in bytes."""
    store = Store(PrefixTree(), KV, 0, Budget(total_bytes=budget), "lru")
    policy = TreePolicy(ReuseRules(), store, SharedIndex(store.tree), no_states())
    scheduler, kept, waiting = Scheduler(policy, BatchRules(max_num_seqs=AT_ONCE)), Kept(), list(requests)[::-1]
    now = 0
    while waiting or not scheduler.idle:
        while waiting and len(scheduler.running) + len(scheduler.waiting) < AT_ONCE:
            scheduler.add(waiting.pop())
        step = scheduler.schedule(now)
        assert step is not None
        done = [chunk.sequence for chunk in step.chunks if chunk.last] + step.decodes
        ended = [one for one in done if one.generated + 1 >= one.request.output_len]
        now += 1
        scheduler.complete(step, now, ended)
        for one in ended:
            assert one.first_plan is not None
            kept.asked += one.request.num_tokens
            kept.found += one.first_plan.resume
    kept.inserted, kept.evicted = store.inserted_bytes, store.evicted_bytes
    return kept


def tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 150_000, count).astype(np.int32)


def mixed(rng: np.random.Generator) -> list[Request]:
    """Eight of ten tokens shared: 40 documents of 1,000 tokens by Zipf, each with 250 tokens of its own."""
    documents = [tokens(rng, 1_000) for _ in range(40)]
    picks = np.minimum(rng.zipf(1.3, 1_000), 40) - 1
    return [Request(at, 0, (Span(documents[pick]), Span(tokens(rng, 250))), 8) for at, pick in enumerate(picks)]


def chat(rng: np.random.Generator) -> list[Request]:
    """150 sessions of five turns of 200 tokens and answers of 50, in any order of sessions."""
    said = [np.empty(0, np.int32) for _ in range(150)]
    asked = []
    for at, session in enumerate(rng.permutation(np.repeat(np.arange(150), 5))):
        prompt, answer = np.concatenate([said[session], tokens(rng, 200)]), tokens(rng, 50)
        asked.append(Request(at, 0, (Span(prompt),), len(answer), output=answer))
        said[session] = np.concatenate([prompt, answer])
    return asked


def batch(rng: np.random.Generator) -> list[Request]:
    """One instruction of 50 tokens before 100 inputs of 200, ten times."""
    asked = []
    for instruction in (tokens(rng, 50) for _ in range(10)):
        asked += [Request(0, 0, (Span(instruction), Span(tokens(rng, 200))), 8) for _ in range(100)]
    return [Request(at, 0, one.spans, 8) for at, one in enumerate(asked)]


BLOCKS = (16, 64)
SHARES = (0.1, 0.25, 0.5, 1.0, 1.2)
WORKLOADS = {"mixed": mixed, "chat": chat, "batch": batch}


def hits(requests: list[Request]) -> dict[str, float]:
    """Hits and evictions at budgets from a tenth of the working set on."""
    infinite = served(requests, 1 << 60)
    working_set, bound = infinite.inserted, infinite.found / infinite.asked
    found: dict[str, float] = {"working_set_tokens": working_set // KV, "infinite_hit_rate": bound}
    for share in SHARES:
        kept = served(requests, int(share * working_set))
        found[f"hits_of_infinite_at_{share}"] = kept.found / kept.asked / bound
        found[f"evicted_of_inserted_at_{share}"] = kept.evicted / kept.inserted
    return found


def page(results: dict[str, Any]) -> str:
    """The page beside the results."""
    rows: list[tuple[str, str, str]] = []
    for query, bar in ((8_192, 1), (131_072, 5)):
        found = results[f"lookup_{query}"]
        shape = (
            f"{found['nodes']:,} nodes, {found['tokens'] / 1e6:.1f} M tokens, {found['nodes_on_path']:.0f} on the path"
        )
        times = f"p50 {found['p50_ms']:.3f} ms, p99 {found['p99_ms']:.3f} ms"
        rows.append((f"lookup of {query:,} tokens: {shape}", f"p99 {bar} ms", times))
    for size in BLOCKS:
        found = results[f"metadata_block_{size}"]
        rows.append((f"nodes per insertion, blocks of {size}", "2", f"{found['nodes_per_insert']:.2f}"))
        rows.append((f"bytes per node, blocks of {size}", "1 KB", f"{found['bytes_per_node']:.0f} bytes"))
        shares = f"{found['share_of_kv']:.4%}; a table of digests {found['table_share_of_kv']:.4%}"
        rows.append((f"metadata ÷ KV, blocks of {size}", "10 %", shares))
    for name in WORKLOADS:
        found = results[f"lru_{name}"]
        shares = ", ".join(f"{found[f'hits_of_infinite_at_{one}']:.3f} at {one}" for one in SHARES)
        rows.append((f"LRU hits ÷ infinite cache, {name}, by share of the working set", "0.95 at 1.0", shares))
        left = ", ".join(f"{found[f'evicted_of_inserted_at_{one}']:.3f} at {one}" for one in SHARES)
        rows.append((f"evicted ÷ inserted bytes, {name}", "0.10 at 1.2", left))
    where = f"On {results['machine']}, commit {results['commit']}; `benchmarks/must_hold/dense.py`."
    return f"# Bars of a dense prefix cache\n\n{table(('what', 'must be within', 'measured'), rows)}\n{where}\n"


def main() -> None:
    """Measure everything and write it down."""
    results = facts()
    for query in (8_192, 131_072):
        results[f"lookup_{query}"] = lookups(query)
    for block_size in BLOCKS:
        results[f"metadata_block_{block_size}"] = metadata(block_size)
    for name, make in WORKLOADS.items():
        results[f"lru_{name}"] = hits(make(np.random.default_rng(2)))
    write_results(HERE / "dense.json", results)
    (HERE / "dense.md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
