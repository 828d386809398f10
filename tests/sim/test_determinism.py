"""The same configuration gives the same bytes, in any process."""

import os
import subprocess
import sys

PROGRAM = """
import json, sys
from dataclasses import asdict
import numpy as np
from spanlab.core import placement
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.request import Request, Span
from spanlab.core.prefix_index import SharedIndex
from spanlab.core.batch_rules import BatchRules
from spanlab.core.budget import Budget
from spanlab.core.store import Store
from spanlab.core.tree import PrefixTree
from spanlab_sim import arrivals
from spanlab_sim.run import simulate
from spanlab_sim.timing import ConstantTiming

rng = np.random.default_rng(3)
documents = [rng.integers(0, 50_000, n, dtype=np.int32) for n in (300, 700, 900)]
requests = [
    Request(i, i % 3, (Span(documents[i % 3][: 100 + 4 * i], reusable=True),
                       Span(rng.integers(0, 50_000, 20, dtype=np.int32))), 1 + i % 40)
    for i in range(120)
]
tree = PrefixTree()
store = Store(tree, 10, 400, Budget(total_bytes=25_000), "lru")
facts = placement.ArmFacts(grid=16, unit=16, warmup=5, max_tokens=1_000)
learned = placement.DynamicProgram(3, placement.Dp(update="periodic"), facts=facts)
placer = placement.Union((learned, placement.branch(), placement.boundary()))
policy = TreePolicy(ReuseRules(needs_states=True, grid=16), store, SharedIndex(tree), placer)
arrived = arrivals.poisson_per_group(requests, np.random.default_rng(4), rate_rps=6.0)
records = []
row = simulate(arrived, policy, BatchRules(max_num_batched_tokens=128, max_num_seqs=8),
               ConstantTiming(1e-4, 1e-3, 1e-4), records.append, seed=4, rate_rps=6.0)
json.dump([asdict(row), *map(asdict, records)], sys.stdout)
"""


def output(hash_seed: str) -> bytes:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True).stdout


def test_records_are_the_same_bytes_under_any_hash_seed():
    first, second = output("0"), output("1")
    assert b'"request_id": 119' in first
    assert b'"evicted_bytes": 0' not in first
    assert first == second
