"""The schedule of `vllm_0_32`, and of each later release, is vLLM's own, step by step.

`expected_vllm_0_32.json` holds what vLLM's scheduler printed for cases of `vllm_cases`; the marker
`oracle` runs it again over cases that nobody has seen (`SPANLAB_ORACLE_SEEDS=first,stop`).
"""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from spanlab.core.policies.chunks import CountedBlocks, UnsharedPolicy
from spanlab.core.protocol import Policy
from spanlab.schedule import PRESETS, Case, read_cases, schedule

from .vllm_cases import (
    listed,
    make_aborted_case,
    make_async_case,
    make_async_drafted_case,
    make_async_drafted_hybrid_case,
    make_case,
    make_continued_case,
    make_drafted_case,
    make_drafted_hybrid_case,
    make_eagle_case,
    make_grouped_case,
    make_inner_case,
    make_limited_case,
    make_local_case,
    make_local_modules_case,
    make_modules_case,
    make_priority_case,
    make_reordered_case,
    make_salted_case,
    make_uncached_async_case,
    make_uncached_async_drafted_case,
    make_uncached_case,
    make_uncached_eagle_case,
    make_whole_case,
)

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected_vllm_0_32.json").read_text())
PYTHON = Path(os.environ.get("SPANLAB_ORACLE_VLLM", HERE.parents[1] / ".venvs/vllm/bin/python"))


def uncached(case: Case, state_groups: int) -> UnsharedPolicy:
    """The policy of a server without prefix caching."""
    store = CountedBlocks(case.num_blocks - 1, 1)
    return UnsharedPolicy(case.block_size, store, states=state_groups, caches=False)


def policy_of(case: Case, given: dict, release: str) -> Policy:
    """The policy of a case as its driver reads it."""
    return PRESETS[release](case) if given.get("prefix_caching", True) else uncached(case, given.get("state_groups", 0))


def known(given: dict) -> dict:
    """A case without the keys that only the driver reads: those of a server without prefix caching."""
    if given.get("prefix_caching", True):
        return given
    return {key: value for key, value in given.items() if key not in ("prefix_caching", "state_groups", "mamba_mode")}


def decide(folder: Path, cases: dict, release: str = "vllm_0_32") -> dict:
    """What we decide about cases, as plain JSON."""
    path = folder / "ours.json"
    path.write_text(json.dumps({name: known(case) for name, case in cases.items()}))
    decided = {name: schedule(case, policy_of(case, cases[name], release)) for name, case in read_cases(path).items()}
    return {
        name: {
            "reused_on_admission": one.reused_on_admission,
            "preemptions": one.preemptions,
            "num_steps": one.num_steps,
            "steps": listed(one.steps),
        }
        for name, one in decided.items()
    }


def digest(steps: list[dict[str, int]]) -> str:
    """Tokens by request and step, whatever their order within a step."""
    return hashlib.sha256(json.dumps(steps, sort_keys=True).encode()).hexdigest()[:16]


def summarise(decided: dict) -> dict:
    """The part of a case that the committed file contains."""
    return {**decided, "steps": digest(decided["steps"])}


#: Makers of cases, by the key that their stored decisions have.
MAKERS = {
    "cases": make_case,
    "drafted_cases": make_drafted_case,
    "eagle_cases": make_eagle_case,
    "uncached_cases": make_uncached_case,
    "uncached_eagle_cases": make_uncached_eagle_case,
    "grouped_cases": make_grouped_case,
    "async_cases": make_async_case,
    "uncached_async_cases": make_uncached_async_case,
    "salted_cases": make_salted_case,
    "continued_cases": make_continued_case,
    "limited_cases": make_limited_case,
    "whole_cases": make_whole_case,
    "aborted_cases": make_aborted_case,
    "priority_cases": make_priority_case,
    "drafted_hybrid_cases": make_drafted_hybrid_case,
    "local_cases": make_local_case,
    "async_drafted_cases": make_async_drafted_case,
    "async_drafted_hybrid_cases": make_async_drafted_hybrid_case,
    "uncached_async_drafted_cases": make_uncached_async_drafted_case,
    "modules_cases": make_modules_case,
}
STORED = [(kind, seed) for kind in MAKERS for seed in sorted(EXPECTED[kind], key=int)]


@pytest.mark.parametrize(("kind", "seed"), STORED)
def test_schedule_equals_vllms_printed_one(tmp_path, kind, seed):
    decided = decide(tmp_path, {seed: MAKERS[kind](int(seed))})
    assert summarise(decided[seed]) == EXPECTED[kind][seed]


def answered(arrive_step: int, **model: object) -> dict:
    """A request whose last output token comes in step 6 or 7, a longer one, and one that continues the first."""
    prompt, output = [20, 21, 22, 23, 24], [7, 8, 9, 10, 11, 12]
    requests = [
        {"tokens": prompt, "output_len": 6, "arrive_step": 1},
        {"tokens": [30], "output_len": 20, "arrive_step": 1},
        {"tokens": [*prompt, *output, 25], "output_len": 1, "arrive_step": arrive_step},
    ]
    sizes = {"block_size": 2, "num_blocks": 60, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    return {**sizes, "async_scheduling": True, "requests": requests, **model}


@pytest.mark.parametrize(
    ("model", "arrive_step", "reused"),  # what vLLM reused
    [({}, 7, 8), ({}, 8, 10), ({"mamba_mode": "align"}, 8, 8), ({"mamba_mode": "align"}, 9, 10)],
)
def test_end_of_an_answer_is_stored_when_delivered(tmp_path, model, arrive_step, reused):
    decided = decide(tmp_path, {"case": answered(arrive_step, **model)})["case"]
    assert decided["reused_on_admission"] == [0, 0, reused]


@pytest.mark.parametrize(
    ("model", "abort_step", "reused"),  # what vLLM reused
    [({}, 7, 8), ({}, 8, 10), ({"mamba_mode": "align"}, 8, 8), ({"mamba_mode": "align"}, 9, 10)],
)
def test_answer_aborted_before_its_delivery_lacks_its_end(tmp_path, model, abort_step, reused):
    case = answered(9, **model)
    case["requests"][0]["abort_step"] = abort_step
    decided = decide(tmp_path, {"case": case})["case"]
    assert decided["reused_on_admission"] == [0, 0, reused]


@pytest.mark.parametrize(
    ("num_blocks", "preemptions", "steps"),  # of vLLM 0.33
    [(10, 0, [192, 67, 1, 1]), (9, 2, [192, 64, 67, 1, 1])],
)
def test_request_alone_is_preempted_while_a_step_holds_its_states(tmp_path, num_blocks, preemptions, steps):
    prompt = {"tokens": list(range(259)), "output_len": 3, "arrive_step": 0}
    sizes = {"block_size": 64, "max_num_seqs": 4, "max_num_batched_tokens": 192, "num_blocks": num_blocks}
    model = {"mamba_mode": "align", "async_scheduling": True, "inner_states": True, "retention": 128}
    decided = decide(tmp_path, {"case": {**sizes, **model, "requests": [prompt]}}, "vllm_0_33")["case"]
    assert (decided["preemptions"], [step["0"] for step in decided["steps"]]) == (preemptions, steps)


def evicting(sizes: dict, num_blocks: int, *lengths: int) -> dict:
    """Prompts of these lengths one after another, each with one output token, and the first one again."""
    prompts = [list(range(1000 * number, 1000 * number + length)) for number, length in enumerate(lengths, 1)]
    requests = [
        {"tokens": tokens, "output_len": 1, "arrive_step": 2 * at} for at, tokens in enumerate([*prompts, prompts[0]])
    ]
    model = {"block_size": 16, "draft_method": "eagle", "retention": 0, "num_blocks": num_blocks, **sizes}
    return {"max_num_seqs": 2, "max_num_batched_tokens": 128, "requests": requests, **model}


@pytest.mark.parametrize(("num_blocks", "reused"), [(13, 0), (14, 32)])  # of vLLM 0.32
def test_last_block_of_a_prompt_has_a_key_before_it_is_full(tmp_path, num_blocks, reused):
    groups = [{"kind": "window", "span": 16}, {"kind": "full", "block_size": 32}]
    case = evicting({"draft_tokens": 1, "groups": groups}, num_blocks, 80, 80)
    decided = decide(tmp_path, {"case": case})["case"]
    assert decided["reused_on_admission"] == [0, 0, reused]


@pytest.mark.parametrize(("num_blocks", "reused"), [(15, 0), (16, 32)])  # of vLLM 0.32
def test_first_block_is_stored_before_all_modules_have_written_the_second(tmp_path, num_blocks, reused):
    groups = [{"kind": "window", "span": 16, "block_size": 32}, {"kind": "full"}]
    case = evicting({"draft_tokens": 2, "draft_modules": 2, "groups": groups}, num_blocks, 80, 32, 80)
    decided = decide(tmp_path, {"case": case})["case"]
    assert decided["reused_on_admission"] == [0, 0, 0, reused]


@pytest.mark.oracle
@pytest.mark.parametrize("release", PRESETS)
@pytest.mark.parametrize("make", [*MAKERS.values(), make_inner_case, make_local_modules_case, make_reordered_case])
def test_schedule_equals_vllms_on_random_cases(tmp_path, make, release):
    first, stop = map(int, os.environ.get("SPANLAB_ORACLE_SEEDS", "100000,100050").split(","))
    cases = {str(seed): make(seed) for seed in range(first, stop)}
    ours = decide(tmp_path, cases, release)
    out, driver = tmp_path / "theirs.json", HERE / "vllm_driver.py"
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    before = PYTHON.parents[1] / "releases" / release  # of the first one, the environment's own
    environment = os.environ | ({"PYTHONPATH": str(before)} if before.is_dir() else {})
    subprocess.run([PYTHON, driver, tmp_path / "cases.json", out], check=True, env=environment)
    theirs = json.loads(out.read_text())
    taken = [seed for seed in cases if "refused" not in theirs[seed]]  # a release may refuse settings
    assert len(taken) > len(cases) / 2
    assert [seed for seed in taken if ours[seed] != theirs[seed]] == []
