"""Replays the request sequences of `sglang_driver.py` on an arm of this project."""

import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from omegaconf import OmegaConf

from spanlab.build import build_policy
from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.settings import StoreSettings, Strategy

STRATEGIES = Path(__file__).parents[2] / "conf" / "strategy"
PRESETS = {False: "sglang_0_5_23", True: "sglang_0_5_23_hybrid"}
GRID = 64


def preset(case) -> TreePolicy:
    """The policy of the shipped preset, with a store that is never full: one byte a token, one a state."""
    loaded = OmegaConf.load(STRATEGIES / f"{PRESETS[case['hybrid']]}.yaml")
    strategy = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Strategy), loaded))
    strategy.block_size = case["page"]
    hybrid = case["hybrid"]
    bytes_of = {"kv_bytes_per_token": 1, "state_bytes": int(hybrid), "prefill_flops": lambda start, stop: stop - start}
    model = SimpleNamespace(is_hybrid=hybrid, grid=GRID if hybrid else 1, attention_layers=1, **bytes_of)
    model.layer_kv_bytes = model.drafter_layer_bytes = model.kv_bytes_per_token
    model.bounded = ()
    store = StoreSettings(kv_gib=1.0, state_gib=1.0, total_gib=None)
    study = SimpleNamespace(
        model=model, store=store, batch=BatchRules(), hardware=SimpleNamespace(compute_capability=0)
    )
    return build_policy(study, strategy, 0, 1 << 20)


def tokens_of(runs):
    found = [np.arange(first, first + count, dtype=np.int32) for first, count in runs]
    return np.concatenate(found) if found else np.zeros(0, np.int32)


class Replay:
    """One case on one policy."""

    def __init__(self, case):
        self.hybrid, self.policy = case["hybrid"], preset(case)
        self.running, self.done = {}, {}

    def run(self, ops):
        results = []
        for op in ops:
            results.append({**getattr(self, op[0])(*op[1:]), **self.sizes()})
            self.policy.check()
        return results

    def start(self, name, runs):
        policy = self.policy
        request = Request(0, 0, (Span(tokens_of(runs)),))
        plan = policy.match(request, 0)
        page, unit = policy.store.tree.block_size, max(policy.store.tree.block_size, GRID)
        matched = min(plan.matched, (plan.prompt - 1) // page * page)
        allocation = policy.allocate(plan, 0)
        self.running[name], self.done[name] = allocation, plan.resume
        branch = matched // unit * unit if self.hybrid else 0
        return {"matched": matched, "reused": plan.resume, "branch": branch if branch > plan.resume else 0}

    def chunk(self, name, count):
        allocation = self.running[name]
        stop = min(self.done[name] + count, allocation.plan.prompt)
        if stop == self.done[name]:
            return {"state": 0}
        self.done[name], states = stop, [position for position in allocation.captures if position <= stop]
        self.policy.insert(allocation, stop, 0)
        return {"state": max(states, default=0)}

    def finish(self, name, runs):
        self.chunk(name, 1 << 30)
        policy, allocation = self.policy, self.running.pop(name)
        output = tokens_of(runs)
        allocation.plan.request = replace(allocation.plan.request, output=output)
        prompt = allocation.plan.prompt
        assert policy.append(allocation, prompt, prompt + len(output))
        policy.finish(allocation, len(output), 0)
        policy.free(allocation, 0)
        return {}

    def abandon(self, name):
        self.policy.free(self.running.pop(name), 0)
        return {}

    def evict(self, tokens, states):
        content = self.policy.store
        before = content.tree.num_tokens, content.state_cached
        content.evict(tokens, states)
        return {"tokens": before[0] - content.tree.num_tokens, "states": before[1] - content.state_cached}

    def sizes(self):
        content = self.policy.store
        locked, states = content.kv_locked, content.state_locked
        evictable = [content.kv_cached - locked, content.state_cached - states]
        return {"evictable": evictable, "protected": [locked, states], "nodes": self.nodes()}

    def nodes(self):
        found, waiting = [], [(root, b"") for root in self.policy.index.all()]
        while waiting:
            node, path = waiting.pop()
            for child in node.children.values():
                below = path + child.edge.tobytes()
                state = any(state.position == child.depth for state in child.states)
                found.append([child.start, child.depth, zlib.crc32(below), int(state)])
                waiting.append((child, below))
        return sorted(found)
