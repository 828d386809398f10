"""The presets `llama_cpp` and `mistralrs_0_9` reuse what running servers reported, request by request.

The stored files hold what llama-server (llama.cpp at 0c1e57098) and mistral.rs 0.9.5 reported for cases of
`sequence_prompts`, with SmolLM2-135M on a CPU. The order of beginnings and ends is the servers' own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.core.request import Request, Span

from .presets import build
from .sequence_prompts import sequences_case, slots_case

HERE = Path(__file__).parent
SLOTS = json.loads((HERE / "llama_cpp.json").read_text())
SEQUENCES = json.loads((HERE / "mistralrs_0_9_5.json").read_text())
#: llama.cpp's KV of a token of SmolLM2-135M, with the cell's position and sequence.
TOKEN_BYTES = 23_064
GIB = 1 << 30


def requests_of(case: dict[str, Any]) -> list[Request]:
    requests = [request for wave in case["waves"] for request in wave]
    return [
        Request(
            number,
            0,
            (Span(np.array(request["prompt"], np.int32)),),
            request["output"],
            output=np.full(request["output"], request["answer"], np.int32),
        )
        for number, request in enumerate(requests)
    ]


class Replay:
    """Runs requests on a policy in the order of a server's events."""

    def __init__(self, policy: Any, requests: list[Request]) -> None:
        self.policy, self.requests = policy, requests
        self.running: dict[int, Any] = {}
        self.plans: dict[int, Any] = {}

    def begin(self, number: int) -> None:
        plan = self.policy.match(self.requests[number], 0)
        allocation = self.policy.allocate(plan, 0)
        assert allocation is not None, f"request {number} does not fit"
        self.policy.insert(allocation, plan.prompt, 0)
        self.policy.check()
        self.plans[number], self.running[number] = plan, allocation

    def end(self, number: int) -> None:
        allocation, prompt = self.running.pop(number), self.plans[number].prompt
        generated = self.requests[number].output_len - 1
        assert self.policy.append(allocation, prompt, prompt + generated)
        self.policy.finish(allocation, generated, 0)
        self.policy.free(allocation, 0)
        self.policy.check()

    def run(self, events: str) -> list[int]:
        """Follow events; return the reused tokens of each request."""
        for event in events.split():
            (self.begin if event[0] == "+" else self.end)(int(event[1:]))
        assert not self.running
        return [self.plans[number].resume for number in range(len(self.requests))]


def slots_policy(case: dict[str, Any]) -> Any:
    host = (case["host_mib"] << 20) // TOKEN_BYTES
    options = {
        "parallel": case["slots"],
        "kv_unified": case["unified"],
        "slot_prompt_similarity": case["similarity"],
        "cache_reuse": case["chunk"],
        "cache_ram_gib": host / GIB,
        "cache_idle_slots": case["idle_to_host"],
    }
    return build("llama_cpp", total=case["cells"], options=options)


@pytest.mark.parametrize("seed", sorted(SLOTS, key=int))
def test_slots_reuse_what_llama_server_reports(seed):
    case = slots_case(int(seed))
    replay = Replay(slots_policy(case), requests_of(case))
    assert replay.run(SLOTS[seed]["events"]) == SLOTS[seed]["reused"]
    chosen = [replay.plans[number].slot.number for number in range(len(replay.requests))]
    assert chosen == SLOTS[seed]["slots"]


@pytest.mark.parametrize("seed", sorted(SEQUENCES, key=int))
def test_sequences_reuse_what_mistral_rs_reports(seed):
    requests = requests_of(sequences_case(int(seed)))
    policy = build("mistralrs_0_9", total=1 << 20, options={"prefix_cache_n": None})  # on a CPU nothing is evicted
    events = " ".join(f"+{number} -{number}" for number in range(len(requests)))
    assert Replay(policy, requests).run(events) == SEQUENCES[seed]["reused"]


def test_the_cases_show_every_rule():
    cases = [(slots_case(int(seed)), SLOTS[seed]) for seed in SLOTS]
    assert sum(len(result["reused"]) for _, result in cases) >= 300
    assert sum(len(result["reused"]) for result in SEQUENCES.values()) >= 300
    for key in ("slots", "unified", "similarity", "chunk", "host_mib", "idle_to_host"):
        assert len({case[key] for case, _ in cases}) > 1, f"all cases have the same {key}"
    assert any("+1 +2" in result["events"] for _, result in cases), "no requests ran at once"


#: Settings of cases, and values that turn a rule off.
WITHOUT = {"chunk": 0, "host_mib": 0, "similarity": 0.0, "idle_to_host": False}


@pytest.mark.parametrize("key", WITHOUT)
def test_a_rule_that_is_off_shows(key):
    """Some case would reuse other tokens, so that its stored answer judges the rule."""
    differing = 0
    for seed, result in SLOTS.items():
        case = slots_case(int(seed))
        if case[key] != WITHOUT[key]:
            policy = slots_policy(case | {key: WITHOUT[key]})
            differing += Replay(policy, requests_of(case)).run(result["events"]) != result["reused"]
    assert differing
