"""Cases of a schedule comparison that make no sense name the key, what it is and what was expected."""

import json
import math
import os
import random
import re
from typing import Any

import pytest

from spanlab.schedule import PRESETS, Case, read_cases, schedule
from spanlab.study.schedule import Schedule, run_schedule

CASE: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 9,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "requests": [{"tokens": [1, 2], "output_len": 1}],
}
HYBRID = CASE | {"mamba_mode": "align"}
MODULES = {"draft_tokens": 3, "draft_method": "eagle", "draft_modules": 3}
WRONG = {
    "another mode": (CASE | {"mamba_mode": "all"}, "a.mamba_mode=all: expected null or align"),
    "groups of no states": (CASE | {"state_groups": 2}, "a.state_groups=2: expected mamba_mode=align beside it"),
    "no group of states": (HYBRID | {"state_groups": 0}, "a.state_groups=0: expected a whole number of 1 or more"),
    "a share of a group": (HYBRID | {"state_groups": 1.5}, "a.state_groups=1.5: expected a whole number"),
    "states within blocks": (HYBRID | {"retention": 24}, "a.retention=24: expected a multiple of block_size=16"),
    "drafts by nobody": (CASE | {"draft_tokens": 2, "draft_method": "mtp"}, "a.draft_method=mtp: expected ngram or"),
    "modules of no drafter": (
        CASE | {"draft_tokens": 2, "draft_modules": 2},
        "a.draft_modules=2: expected draft_method=eagle beside it",
    ),
    "blocks within reach of modules": (
        CASE | {"block_size": 2, **MODULES},
        "a.block_size=2: expected at least 3, which the modules of the drafter read ahead",
    ),
    "limits within reach of modules": (
        CASE | {"long_prefill_token_threshold": 2, **MODULES},
        "a.long_prefill_token_threshold=2: expected at least 3, which the modules of the drafter read ahead",
    ),
    "steps within reach of modules": (
        CASE | {"max_num_batched_tokens": 2, **MODULES},
        "a.max_num_batched_tokens=2: expected at least 3, which the modules of the drafter read ahead",
    ),
    "a drafter of nothing": (CASE | {"draft_method": "eagle"}, "a.draft_method=eagle: expected draft_tokens beside it"),
    "an unknown key": (CASE | {"blocks": 2}, "a.blocks: no such key; expected async_scheduling, block_size"),
    "no size": ({key: CASE[key] for key in CASE if key != "num_blocks"}, "a.num_blocks is missing"),
    "a step that no number holds": (
        CASE | {"requests": [{"tokens": [1], "output_len": 1, "arrive_step": 2**53}]},
        "a.requests[0].arrive_step=9007199254740992: expected at most 9007199254740991",
    ),
    "a salt that is a number": (
        CASE | {"requests": [{"tokens": [1], "output_len": 1, "cache_salt": 3}]},
        "a.requests[0].cache_salt=3: expected a text",
    ),
    "a switch as a size": (CASE | {"block_size": True}, "a.block_size=True: expected a whole number"),
    "an adaptive limit of nothing": (
        CASE | {"long_prefill_token_threshold_adaptive": True},
        "a.long_prefill_token_threshold_adaptive=true: expected long_prefill_token_threshold beside it",
    ),
    "a budget below the requests": (
        CASE | {"max_num_batched_tokens": 1},
        "a.max_num_batched_tokens=1: expected at least max_num_seqs=2",
    ),
    "states of whole prompts": (
        HYBRID | {"enable_chunked_prefill": False},
        "a.enable_chunked_prefill=false: expected true with mamba_mode=align",
    ),
    "whole prompts beyond a step": (
        CASE | {"enable_chunked_prefill": False, "requests": [{"tokens": [1] * 60, "output_len": 5}]},
        "a.max_num_batched_tokens=64: expected at least 65, the most tokens of a request and its drafts",
    ),
    "a limit of whole prompts": (
        CASE | {"enable_chunked_prefill": False, "long_prefill_token_threshold": 4},
        "a.long_prefill_token_threshold=4: expected 0, for enable_chunked_prefill=false computes a prompt in one step",
    ),
    "an abort before the arrival": (
        CASE | {"requests": [{"tokens": [1], "output_len": 1, "arrive_step": 4, "abort_step": 3}]},
        "a.requests[0].abort_step=3: expected a whole number of 4 or more",
    ),
    "an unknown policy": (CASE | {"policy": "lifo"}, "a.policy=lifo: expected fcfs or priority"),
    "a priority without its policy": (
        CASE | {"requests": [{"tokens": [1], "output_len": 1, "priority": 2}]},
        "a.requests[0].priority=2: expected policy=priority beside it",
    ),
    "an unknown group": (
        CASE | {"groups": [{"kind": "sparse"}]},
        "a.groups[0].kind=sparse: expected full, window, chunk, state or ring",
    ),
    "a window without a length": (
        CASE | {"groups": [{"kind": "window"}]},
        "a.groups: span=0 of a group of kind=window: expected 1 token or more",
    ),
    "rings alone": (
        CASE | {"groups": [{"kind": "ring"}]},
        "a.groups: groups of kinds ring: expected one whose blocks a prefix can reuse",
    ),
    "full attention of two sizes": (
        CASE | {"groups": [{"kind": "full"}, {"kind": "full", "block_size": 32}]},
        "a.groups: blocks of [16, 32] tokens in groups of kind=full: expected one size",
    ),
    "chunks beside other blocks": (
        CASE | {"groups": [{"kind": "chunk", "span": 8, "block_size": 64}, {"kind": "full"}]},
        "a.groups: blocks of [16, 64] tokens with a group of kind=chunk: expected one size, as in vLLM",
    ),
    "states that no group has": (
        CASE | {"groups": [{"kind": "full"}], "mamba_mode": "align"},
        "a.mamba_mode=align: expected null beside groups without kind=state",
    ),
    "states of no mode": (
        CASE | {"groups": [{"kind": "full"}, {"kind": "state"}]},
        "a.mamba_mode=null: expected align beside groups of kind=state",
    ),
    "an odd retention of windows": (
        CASE | {"groups": [{"kind": "window", "span": 8}], "retention": 24},
        "a.retention=24: expected a multiple of 16, the tokens of a block",
    ),
    "no requests": (CASE | {"requests": []}, "a.requests=[]: expected a list of 1 or more"),
    "no tokens": (
        CASE | {"requests": [{"tokens": [], "output_len": 1}]},
        "a.requests[0].tokens=[]: expected a list of 1 or more",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_case_is_one_sentence(tmp_path, wrong):
    given, sentence = WRONG[wrong]
    (tmp_path / "cases.json").write_text(json.dumps({"a": given}))
    with pytest.raises(ValueError, match=f"^cases={re.escape(str(tmp_path))}/cases.json: {re.escape(sentence)}"):
        read_cases(tmp_path / "cases.json")


@pytest.mark.parametrize(("case", "groups"), [(CASE, 0), (HYBRID, 1), (HYBRID | {"state_groups": 3}, 3)])
def test_states_have_one_group_by_default(tmp_path, case, groups):
    (tmp_path / "cases.json").write_text(json.dumps({"a": case}))
    assert [one.state_groups for one in read_cases(tmp_path / "cases.json").values()] == [groups]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "NaN", '{"a": NaN}', "[" * 200_000, '{"a": 1, "a": 2}', "9" * 5000, '"\xff"']
)
def test_a_damaged_file_of_cases_is_one_sentence(tmp_path, content):
    path = tmp_path / "cases.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^cases={re.escape(str(path))}: expected [^\n]+$"):
        read_cases(path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_empty_steps_are_one_entry(tmp_path, asynchronous):
    requests = [{"tokens": [1, 2], "output_len": 2, "arrive_step": step} for step in (0, 10**15)]
    (tmp_path / "cases.json").write_text(
        json.dumps({"a": CASE | {"requests": requests, "async_scheduling": asynchronous}})
    )
    case = read_cases(tmp_path / "cases.json")["a"]
    decided = schedule(case, PRESETS["vllm_0_32"](case))
    both = [{"0": 2}, {"0": 1}], [{"1": 2}, {"1": 1}]
    assert decided.steps == [*both[0], {"empty": 10**15 - 2}, *both[1]]
    assert decided.num_steps == 10**15 + 2


def test_steps_end_where_all_requests_are_aborted(tmp_path):
    requests = [{"tokens": [1], "output_len": 9, "abort_step": 1}, {"tokens": [1], "output_len": 9, "abort_step": 0}]
    (tmp_path / "cases.json").write_text(json.dumps({"a": CASE | {"requests": requests}}))
    case = read_cases(tmp_path / "cases.json")["a"]
    decided = schedule(case, PRESETS["vllm_0_32"](case))
    assert (decided.steps, decided.reused_on_admission) == ([{"0": 1}], [0, None])


def test_too_few_blocks_name_the_file(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"a": CASE | {"num_blocks": 1}}))
    sentence = f"cases={path}: a.num_blocks=1: expected at least 2, for request 0 of 2 tokens alone"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        run_schedule(Schedule(cases=str(path), out=str(tmp_path / "out.json")), "run", tmp_path)


FULL = CASE | {
    "mamba_mode": None,
    "state_groups": 0,
    "retention": None,
    "draft_tokens": 2,
    "draft_method": "eagle",
    "draft_modules": 2,
    "async_scheduling": False,
    "policy": "priority",
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 8,
    "long_prefill_token_threshold_adaptive": True,
}
REQUEST = {"tokens": [1, 2], "output_len": 2, "arrive_step": 1, "priority": -1, "abort_step": 3, "cache_salt": "a"}
NEVER_VALID = (math.nan, math.inf, 10**400, -(10**400), 1.5, [], {}, [[]], {"a": {}}, "", "\n", "\ud800", "no", [None])
REQUIRED = {"block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "requests", "tokens", "output_len"}


def test_a_prompt_that_can_never_end_is_named():
    """A chunk to token 32 would leave 2: it ends at 31. The next one may not pass 32, and would leave 2, too."""
    prompt = {"tokens": list(range(34)), "output_len": 2}
    sizes = {"num_blocks": 40, "max_num_batched_tokens": 16, "requests": [prompt]}
    case = Case.model_validate(HYBRID | MODULES | sizes)
    with pytest.raises(
        ValueError, match="draft_modules=3: expected 1, request 0 stops, as in vLLM, for its next chunk"
    ):
        schedule(case, PRESETS["vllm_0_32"](case))


def damaged(draw: random.Random) -> str:
    """The text of a case with one fault, in the case or in one of its requests."""
    case = FULL | {"requests": [dict(REQUEST) for _ in range(draw.randint(1, 3))]}
    place = draw.choice((case, draw.choice(case["requests"])))
    key = draw.choice(sorted(place))
    fault = draw.choice(("value", "value", "value", "sign", "bool", "null", "missing", "unknown", "twice", "depth"))
    if key in ("tokens", "cache_salt", "policy", "draft_method", "mamba_mode", "requests") and fault == "sign":
        fault = "value"
    match fault:
        case "value" if key == "cache_salt":  # any text is a salt
            place[key] = draw.choice([one for one in NEVER_VALID if not isinstance(one, str)] + ["\ud800"])
        case "value":
            place[key] = draw.choice(NEVER_VALID)
        case "sign" if key != "priority":
            place[key] = -draw.randint(1, 2**70)
        case "bool" if not isinstance(place[key], bool):
            place[key] = draw.choice((True, False))
        case "null" if key in REQUIRED:
            place[key] = None
        case "missing" if key in REQUIRED:
            del place[key]
        case "twice":
            return json.dumps({"a": case}).replace(f'"{key}":', f'"{key}": 1, "{key}":', 1)
        case "depth":
            return json.dumps({"a": case}).replace("[1, 2]", "[" * draw.choice((2, 300, 50_000)) + "1", 1)
        case _:
            place[draw.choice(("Block_size", "", "x" * 500, "\n", "\ud800", "max_num_partial_prefills"))] = 1
    return json.dumps({"a": case})


@pytest.mark.slow
def test_random_damaged_cases_are_one_sentence_each(tmp_path):
    """`SPANLAB_DAMAGE_SEEDS=first,stop` tries other seeds."""
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"a": FULL | {"requests": [REQUEST]}}))
    assert len(read_cases(path)) == 1
    first, stop = map(int, os.environ.get("SPANLAB_DAMAGE_SEEDS", "0,1000").split(","))
    unclear = []
    for seed in range(first, stop):
        path.write_text(damaged(random.Random(seed)))
        try:
            read_cases(path)
        except ValueError as error:
            sentence = str(error).removeprefix(f"cases={path}: ")
            named = sentence.startswith(("a.", "expected a JSON file")) and sentence.isprintable()
            unclear += [] if named and len(sentence) < 450 else [(seed, sentence)]
        else:
            unclear.append((seed, "was read"))
    assert unclear == []
