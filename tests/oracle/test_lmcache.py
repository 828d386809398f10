"""The preset `lmcache` finds and keeps the chunks that LMCache finds and keeps.

`lmcache_0_5_6.json` holds what LMCache 0.5.6 did with prompts of `chunk_prompts`, one request at a time; the marker
`oracle` runs it again over cases that nobody has seen.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from spanlab.core.policies.block_pool import Chain
from spanlab.core.request import Request, Span

from .chunk_prompts import SIZE, make_case, tokens_of
from .presets import build

HERE = Path(__file__).parent
STORED = json.loads((HERE / "lmcache_0_5_6.json").read_text())
PYTHON = Path(os.environ.get("SPANLAB_ORACLE_VLLM", HERE.parents[1] / ".venvs/vllm/bin/python"))


def replay(case: dict) -> dict:
    """The results of our preset in the form of the driver; one more chunk holds the running request's last tokens."""
    null_block, last_tokens = 1, 1
    policy = build("lmcache", total=(case["capacity"] + null_block + last_tokens) * SIZE)
    names: dict[int, list[int]] = {}
    hits = []
    for number, runs in enumerate(case["prompts"]):
        request = Request(number, 0, (Span(np.array(tokens_of(runs), np.int32)),))
        for at, digest in enumerate(Chain(request, SIZE).digests):
            names.setdefault(digest, [number, at])
        plan = policy.match(request, number)
        allocation = policy.allocate(plan, number)
        assert policy.append(allocation, plan.resume, plan.prompt)
        policy.insert(allocation, plan.prompt, number)
        policy.finish(allocation, 0, number)
        policy.free(allocation, number)
        policy.check()
        hits.append(plan.resume // SIZE)
    return {"hits": hits, "stored": [names[block.digest] for block in policy.store.pool.waiting()]}


@pytest.mark.parametrize("seed", sorted(STORED, key=int))
def test_chunks_equal_lmcaches_stored_ones(seed):
    assert replay(make_case(int(seed))) == STORED[seed]


@pytest.mark.oracle
def test_chunks_equal_lmcaches_on_random_cases(tmp_path: Path):
    out = tmp_path / "told.json"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([PYTHON, HERE / "lmcache_driver.py", "1000", "1030", out], check=True, env=environment)
    told = json.loads(out.read_text())
    assert {seed: replay(make_case(int(seed))) for seed in told} == told
