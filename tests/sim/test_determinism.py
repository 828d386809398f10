"""The same configuration gives the same bytes, in any process. As a program, this file prints them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import numpy as np

from spanlab.core import placement
from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Budget, Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import PrefixTree, SharedIndex
from spanlab_sim.arrivals import PoissonPerGroup
from spanlab_sim.run import simulate
from spanlab_sim.timing import ConstantTiming


def output() -> str:
    """The row and the records of a run that learns and evicts."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 50_000, n, dtype=np.int32) for n in (300, 700, 900)]
    requests = []
    for i in range(120):
        document = Span(documents[i % 3][: 100 + 4 * i], reusable=True)
        question = Span(rng.integers(0, 50_000, 20, dtype=np.int32))
        requests.append(Request(i, i % 3, (document, question), 1 + i % 40))
    tree = PrefixTree()
    store = Store(tree, 10, 400, Budget(total_bytes=25_000), "lru")
    facts = placement.ArmFacts(grid=16, unit=16, warmup=5, max_tokens=1_000)
    learned = placement.DynamicProgram(3, placement.Dp(update="periodic"), facts=facts)
    placer = placement.Union((learned, placement.branch(), placement.boundary()))
    policy = TreePolicy(ReuseRules(needs_states=True, grid=16), store, SharedIndex(tree), placer)
    arrived = PoissonPerGroup(rate_rps=6.0).arrive(requests, np.random.default_rng(4))
    rules, timing = BatchRules(max_num_batched_tokens=128, max_num_seqs=8), ConstantTiming(1e-4, 1e-3, 1e-4)
    records = []
    row = simulate(arrived, policy, rules, timing, records.append, seed=4, rate_rps=6.0)
    return json.dumps([asdict(row), *map(asdict, records)])


def test_records_are_the_same_bytes_under_any_hash_seed():
    here, other_seed = output(), "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = os.environ | {"PYTHONHASHSEED": other_seed}
    there = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, check=True, text=True)
    assert '"request_id": 119' in here
    assert '"evicted_bytes": 0' not in here
    assert there.stdout == here


if __name__ == "__main__":
    sys.stdout.write(output())
