"""Runs vLLM's own offloading policies and its manager; `serve` loads spanlab's orders as a user of vLLM would.

usage: PYTHON_OF_VLLM vllm_offload_driver.py lru FIRST STOP OUT.json
       PYTHONPATH=src PYTHON_OF_VLLM vllm_offload_driver.py serve ORDERS OUT.json
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

sys.path.insert(0, str(Path(__file__).parent))
from chunk_ops import Replay

STEPS, CHUNKS = 150, 40


def capacity(seed: int) -> int:
    """Chunks of the cache of a case."""
    return 3 + seed % 30


def lru(first: str, stop: str) -> dict[str, list]:
    """What vLLM's LRU evicts, by seed."""
    seeds = range(int(first), int(stop))
    return {str(seed): Replay(LRUCachePolicy(capacity(seed)), capacity(seed), seed).run(STEPS) for seed in seeds}


def serve(orders: str) -> dict[str, list]:
    """Hits and evictions of every request under vLLM's manager: its own `lru`, and ours by their names."""
    ours = {f"spanlab_{order}": "spanlab.vllm_policy" for order in orders.split(",")}
    return {name: serve_one(name, module) for name, module in {"lru": None, **ours}.items()}


def serve_one(name: str, module: str | None) -> list[list]:
    """Prompts of popular documents through one manager."""
    manager, draw, rows = CPUOffloadingManager(CHUNKS, name, module), random.Random(0), []
    for number in range(600):
        document, count = min(int(draw.expovariate(0.25)), 30), draw.randint(1, 12)
        keys = [make_offload_key(f"{document} {at}".encode().ljust(32), 0) for at in range(count)]
        request = ReqContext(str(number))
        for at, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (at + 1))
        manager.on_new_request(request)
        missing = [at for at, key in enumerate(keys) if manager.lookup(key, request) is not LookupResult.HIT]
        found = keys[: missing[0] if missing else count]
        manager.prepare_load(found, request)
        manager.complete_load(found, request)
        stored = manager.prepare_store(keys, request)
        assert stored is not None
        manager.complete_store(stored.keys_to_store, request)
        manager.on_request_finished(request)
        rows.append([len(found), sorted(key.hex() for key in stored.evicted_keys)])
    return rows


if __name__ == "__main__":
    task, *given, out = sys.argv[1:]
    Path(out).write_text(json.dumps({"lru": lru, "serve": serve}[task](*given)))
