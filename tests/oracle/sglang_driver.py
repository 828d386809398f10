"""Replays request sequences on SGLang's own prefix caches and prints what they did.

Runs under the interpreter of the oracle's environment (`requirements/sglang.txt`) and imports no spanlab:

    python sglang_driver.py --tree python CASES.json OUT.json

A case has `page`, `hybrid` and `ops`. Tokens are lists of [first id, count] runs. The operations:

    start ID RUNS    match the prompt without its last token, then lock the match
    chunk ID COUNT   compute so many more prompt tokens, or all that are left, and store them
    finish ID RUNS   compute what is left, store prompt and computed output, then unlock
    abandon ID       unlock and store nothing
    evict TOKENS STATES

The code that matches, stores, locks and evicts is SGLang's: `match_prefix`, `checkpoint`, `unlock`, `evict`, and for
hybrids the choice of tracked positions. Only memory pools, which hold no decision, are replaced.
"""

# ruff: noqa: E402 - one module is refused before SGLang is imported
import argparse
import json
import sys
import zlib
from array import array
from types import SimpleNamespace

sys.modules["flashinfer"] = None  # SGLang runs without it; its import needs the libraries of a GPU

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

STATE_CHUNK, CONTEXT, MANY = 64, 1 << 15, 1 << 30


class Allocator:
    """A pool that never runs out."""

    device = torch.device("cpu")

    def __init__(self):
        self.taken = 0

    def available_size(self):
        return MANY

    schedulable_available_size = available_size

    def alloc(self, count):
        self.taken += count
        return torch.arange(self.taken - count, self.taken)

    def free(self, *args, **rest):
        pass

    free_segment = free

    def mamba_full_cache_donor(self):
        return None


class Pool(HybridReqToTokenPool):
    """Rows of token slots and two tracking slots for each request."""

    def __init__(self):
        self.req_to_token = torch.zeros((512, CONTEXT), dtype=torch.int64)
        self.mamba_allocator = Allocator()
        self.mamba_ping_pong_track_buffer_size = 2
        self.enable_mamba_extra_buffer = True
        self.mamba_ckpt_pool = None
        self.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros((512, 2), dtype=torch.int64)

    def write(self, indices, values):
        pass


def patch(page, tree):
    """Answer the questions that SGLang asks of its server's configuration."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache.unified_cache.components import mamba

    if tree == "rust":
        from sglang.srt.mem_cache.rust_tree_core import adapter as rust

    execution = SimpleNamespace(
        mamba=SimpleNamespace(
            mamba_max_states_per_path=-1, enable_mamba_extra_buffer=True, enable_mamba_extra_buffer_lazy=False
        )
    )
    chunk = max(STATE_CHUNK, page)
    for module in (mamba, schedule_batch, *([rust] if tree == "rust" else [])):
        module.get_exec = lambda: execution
        module.mamba_cache_chunk_size = lambda: chunk
        module.mamba_checkpoint_grid = lambda tree_page: chunk
    schedule_batch.get_parallel = lambda: SimpleNamespace(dcp_enabled=False)


def tokens_of(runs):
    found = array("q")
    for first, count in runs:
        found.extend(range(first, first + count))
    return found


class Replay:
    """One case on one cache."""

    def __init__(self, case, tree):
        self.page, self.hybrid, self.tree = case["page"], case["hybrid"], tree
        self.pool = Pool()
        components = (ComponentType.FULL, ComponentType.MAMBA) if self.hybrid else (ComponentType.FULL,)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=Allocator(),
            page_size=self.page,
            enable_mamba_extra_buffer=self.hybrid,
            tree_components=components,
            tree_core_backend=None if tree == "radix" else tree,
        )
        patch(self.page, tree)
        self.cache = RadixCache(params) if tree == "radix" else UnifiedRadixCache(params)
        self.running = {}

    def run(self, ops):
        return [{**getattr(self, op[0])(*op[1:]), **self.sizes()} for op in ops]

    def start(self, name, runs):
        prompt = tokens_of(runs)
        key = RadixKey(prompt, None, limit=len(prompt) - 1)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        reused = match.device_prefix_len
        req = self.request(name, prompt, reused)
        req.mamba_branching_seqlen = match.mamba_branching_seqlen
        req.lock, req.last_node = self.cache.lock(match.last_device_node), match.last_device_node
        self.running[name] = req
        found = match.full_kv_hit_length if self.tree != "radix" else reused
        return {"matched": found, "reused": reused, "branch": match.mamba_branching_seqlen or 0}

    def request(self, name, prompt, reused):
        ended = SimpleNamespace(ended=False)
        kv = SimpleNamespace(
            req_pool_idx=len(self.running) % 512,
            cache_protected_len=reused,
            cache_inserted_len=0,
            swa_evict_floor=0,
            mamba_pool_idx=torch.tensor(0),
            mamba_ping_pong_track_buffer=self.pool.mamba_allocator.alloc(2),
            mamba_ping_pong_empty=[False, False],
            mamba_next_track_idx=0,
            mamba_last_track_idx=0,
            mamba_last_track_seqlen=None,
            mamba_prev_track_seqlen=None,
            mamba_cow_src_index=None,
            mamba_needs_clear=False,
        )
        return SimpleNamespace(
            rid=str(name),
            kv=kv,
            origin_input_ids=prompt,
            full_untruncated_fill_ids=prompt,
            prefix_len=reused,
            finished=lambda: ended.ended,
            ended=ended,
            extra_key=None,
            cache_salt=None,
            priority=0,
            session=None,
            session_id=None,
            kv_rotation_base=None,
        )

    def chunk(self, name, count):
        req, tracked = self.running[name], 0
        stop = min(req.prefix_len + count, len(req.origin_input_ids))
        if stop == req.prefix_len:
            return {"state": 0}
        if self.hybrid:
            self.track(req, stop)
            tracked = req.kv.mamba_last_track_seqlen or 0
        self.cache.checkpoint(req, up_to=stop)
        req.prefix_len = stop
        return {"state": tracked}

    def track(self, req, stop):
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        req.extend_end, req.extend_len = stop, stop - req.prefix_len
        batch = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
            tree_cache=SimpleNamespace(page_size=self.page),
            req_to_token_pool=self.pool,
        )
        ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)

    def finish(self, name, runs):
        self.chunk(name, CONTEXT)
        req = self.running.pop(name)
        req.full_untruncated_fill_ids = req.origin_input_ids + tokens_of(runs)
        req.ended.ended = True
        self.cache.checkpoint(req, up_to=len(req.full_untruncated_fill_ids))
        self.cache.unlock(req.lock)
        return {}

    def abandon(self, name):
        self.cache.unlock(self.running.pop(name).lock)
        return {}

    def evict(self, tokens, states):
        gone = self.cache.evict(EvictParams(num_tokens=tokens, mamba_num=states))
        return {"tokens": gone.num_tokens_evicted, "states": gone.mamba_num_evicted}

    def sizes(self):
        cache = self.cache
        if self.tree == "radix":
            return {"evictable": [cache.evictable_size(), 0], "protected": [cache.protected_size(), 0], "nodes": None}
        evictable, protected = [cache.full_evictable_size(), 0], [cache.full_protected_size(), 0]
        if self.hybrid:
            evictable[1], protected[1] = cache.mamba_evictable_size(), cache.mamba_protected_size()
        nodes = self.nodes() if self.tree == "python" else None
        return {"evictable": evictable, "protected": protected, "nodes": nodes}

    def nodes(self):
        """Every node as [start, stop, checksum of its path, 1 with a state], sorted."""
        found, waiting = [], [(self.cache.tree_core.root_node, b"")]
        while waiting:
            node, path = waiting.pop()
            for child in node.children.values():
                below = path + array("i", child.key.raw_token_ids()).tobytes()
                state = child.component_data[ComponentType.MAMBA].value is not None
                found.append([len(path) // 4, len(below) // 4, zlib.crc32(below), int(state)])
                waiting.append((child, below))
        return sorted(found)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", choices=("python", "rust", "radix"), default="python")
    parser.add_argument("cases")
    parser.add_argument("out")
    options = parser.parse_args()
    with open(options.cases) as file:
        cases = json.load(file)
    results = [Replay(case, options.tree).run(case["ops"]) for case in cases]
    with open(options.out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
