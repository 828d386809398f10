"""`conformance_cases`: any simulator's decisions beside those of stored cases."""

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from spanlab.registry import ENTRIES
from spanlab.schedule import PRESETS, Case, schedule
from spanlab.study.conformance_cases import (
    CASES,
    Answer,
    ConformanceCases,
    Decisions,
    DriverError,
    KindCounts,
    StoredCase,
    read_stored,
    run_cases,
)
from spanlab.study.folder import read_summary

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = ROOT / "benchmarks" / "conformance" / "drivers"
REQUESTS = [{"tokens": [20, 21, 22], "output_len": 2, "output": [7, 8], "arrive_step": 0}]
SETTINGS = {"block_size": 2, "num_blocks": 9, "max_num_seqs": 1, "max_num_batched_tokens": 8}
EXPECTED = {"reused": [0], "preemptions": 0, "steps": [{"0": 3}, {"0": 1}]}


@cache
def cases_of(release: str) -> list[StoredCase]:
    """The stored cases of a release; reading them takes a second."""
    return list(read_stored(CASES / f"{release}.jsonl.zst"))


def cases_file(folder, *names, **changed):
    lines = [
        {
            "name": name,
            "release": "r",
            "kind": name[0],
            "settings": SETTINGS,
            "requests": REQUESTS,
            "expected": EXPECTED,
        }
        | changed
        for name in names
    ]
    path = folder / "cases.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def driver(folder, body):
    """A driver that answers each `case` by the expression or statement `body`."""
    path = folder / "driver.py"
    path.write_text(
        "import json, sys\n"
        "for number, line in enumerate(sys.stdin):\n"
        "    case = json.loads(line)\n"
        f"    {body}\n"
        "    print(json.dumps({'name': case['name'], **claims}), flush=True)\n"
    )
    return f"{sys.executable} {path}"


def run(folder, **settings):
    passed = run_cases(ConformanceCases(**settings), "one", folder)
    return passed, read_summary(folder / "conformance_cases" / "one", "kinds.all", "ended")


def test_the_sample_is_of_the_contract():
    sample = cases_of("vllm_0_32")
    assert len(sample) >= 500
    assert len({case.name for case in sample}) == len(sample)
    for case in sample:
        given = Case.model_validate(case.settings | {"requests": case.requests})
        assert len(case.expected.reused or []) == len(given.requests)
        assert "expected" not in json.loads(case.question)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("release", PRESETS)
def test_every_stored_case_is_decided_as_the_release_did(release, every):
    stored = cases_of(release)
    # a release refuses some cases, which others stand for
    assert Counter(case.kind for case in stored) == Counter(case.kind for case in cases_of("vllm_0_32"))
    for case in stored[::every]:
        given = Case.model_validate(case.settings | {"requests": case.requests})
        made = schedule(given, PRESETS[release](given))
        steps = [step for run in made.steps for step in ([{}] * run["empty"] if "empty" in run else [run])]
        assert Decisions(made.reused_on_admission, made.preemptions, steps) == case.expected, case.name


def test_requests_one_at_a_time_never_share_a_step():
    alone = [case for case in cases_of("vllm_0_32") if case.kind.startswith("one at a time")]
    assert len(alone) == 80
    for case in alone:
        order = [request for step in case.expected.steps or [] for request in step]
        runs = [request for at, request in enumerate(order) if at == 0 or order[at - 1] != request]
        assert runs == [str(number) for number in range(len(case.requests))]


@pytest.mark.parametrize(
    ("name", "kinds", "modelled", "claims"),
    [
        ("spanlab_scheduler", ["one at a time, hybrid", "attention, drafts of EAGLE"], 80, 3),
        ("lru_blocks", ["one at a time, attention", "all at once, attention"], 40, 1),
    ],
)
def test_drivers_of_this_project_decide_as_vllm(tmp_path, name, kinds, modelled, claims):
    command = f"{sys.executable} {DRIVERS / name}.py"
    passed, summary = run(tmp_path, driver=command, kinds=kinds, fail_on=["reused", "preemptions", "steps"])
    counts = summary["kinds"]["all"]
    assert passed
    assert counts["cases"] == 80
    assert counts["claimed"] == counts["equal"]
    assert sorted(counts["equal"].values()) == [0] * (3 - claims) + [modelled] * claims
    assert counts["requests"]["equal"] == counts["requests"]["claimed"] > modelled
    assert not counts["smallest"]


def test_claims_are_counted_apart(tmp_path):
    path = cases_file(tmp_path, "a1", "a2", "b1")
    claims = "claims = {'reused': [number], 'steps': [{'0': 3}]} if case['name'] != 'b1' else {'unsupported': 'b'}"
    passed, summary = run(tmp_path, driver=driver(tmp_path, claims), cases=path)
    assert passed
    assert summary["kinds"]["a"] | {"smallest": None} == {
        "cases": 2,
        "unsupported": {},
        "claimed": {"reused": 2, "preemptions": 0, "steps": 2},
        "equal": {"reused": 1, "preemptions": 0, "steps": 0},
        "requests": {"claimed": 2, "equal": 1},
        "smallest": None,
    }
    assert summary["kinds"]["b"]["unsupported"] == {"b": 1}
    assert summary["kinds"]["all"]["smallest"] == {
        "reused": {"case": "a2", "prompt_tokens": 3, "difference": "request 0: 1, expected 0"},
        "steps": {"case": "a1", "prompt_tokens": 3, "difference": "step 1: none, expected {'0': 1}"},
    }


def test_the_smallest_difference_is_of_the_case_of_fewest_tokens():
    counts, long = KindCounts(), [{**REQUESTS[0], "tokens": list(range(50))}]
    for name, requests in (("long", long), ("short", REQUESTS), ("longer", long * 2)):
        counts.add(StoredCase(name, "r", "k", SETTINGS, requests, Decisions(preemptions=0)), Answer(preemptions=2))
    assert counts.smallest == {"preemptions": (3, "short", "2, expected 0")}


def test_an_unequal_claim_of_fail_on_is_a_failure(tmp_path, capsys):
    path, command = cases_file(tmp_path, "a1"), driver(tmp_path, "claims = {'reused': [2], 'preemptions': 0}")
    assert run(tmp_path, driver=command, cases=path, fail_on=["preemptions"])[0]
    settings = ConformanceCases(driver=command, cases=path, fail_on=["preemptions", "reused"])
    assert not run_cases(settings, "two", tmp_path)
    assert "not equal: reused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("sys.exit(3) if number else None; claims = {}", "a2: the driver ended with exit code 3; expected an answer"),
        ("claims = {'reused': [0, 0]} if number else {}", "a2: the driver answered reused of 2 requests; expected 1"),
        ("claims = {'name': 'x'} if number else {}", "a2: the driver answered name=x; expected one line per case"),
        ("number and print('hello', flush=True); claims = {}", "a2: the driver wrote 'hello\\n': expected JSON"),
        ("claims = {'steps': 1} if number else {}", "a2: the driver wrote"),
    ],
)
def test_a_driver_that_fails_is_named_and_the_cases_before_are_reported(tmp_path, body, problem):
    settings = ConformanceCases(driver=driver(tmp_path, body), cases=cases_file(tmp_path, "a1", "a2", "a3"))
    with pytest.raises(DriverError) as error:
        run_cases(settings, "one", tmp_path)
    assert str(error.value).startswith(problem)
    assert "has the 1 cases before" in str(error.value)
    summary = read_summary(tmp_path / "conformance_cases" / "one", "kinds.all")
    assert summary["kinds"]["all"]["cases"] == 1
    assert summary["ended"].startswith(problem)


def test_a_silent_driver_is_ended(tmp_path):
    settings = {"driver": driver(tmp_path, "sys.stdin.read()"), "cases": cases_file(tmp_path, "a1"), "limit_s": 0.2}
    with pytest.raises(DriverError, match=r"a1: no answer for limit_s=0.2 seconds; .* has the 0 cases before"):
        run(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"driver": "x", "release": "vllm_9"}, "release=vllm_9: expected one of vllm_0_32, vllm_0_33"),
        ({"driver": "x", "kinds": ["attention, drfts"]}, "did you mean attention, drafts"),
        ({"driver": "x", "names": ["a"]}, "names=.a.: no such case in"),
        ({"driver": "x", "cases": "none.jsonl"}, "cases=none.jsonl: expected a readable file of cases"),
    ],
)
def test_settings_that_no_case_has_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ENTRIES["conformance_cases"].check(ConformanceCases(**settings), ROOT)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"driver": " "}, "driver= : expected a command"),
        ({"driver": "'x"}, "driver='x: expected a command .No closing quotation."),
        ({"driver": "x", "limit_s": 0}, "limit_s=0"),
        ({"driver": "x", "fail_on": ["reuse"]}, "fail_on=reuse: expected one of reused"),
    ],
)
def test_settings_are_checked(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ConformanceCases(**settings)


def test_a_program_that_does_not_start_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"driver=/no/program: expected a command that starts \(No such file"):
        run(tmp_path, driver="/no/program", cases=cases_file(tmp_path, "a1"))


def test_a_broken_line_is_named_with_its_number(tmp_path):
    path = Path(cases_file(tmp_path, "a1"))
    path.write_text(path.read_text() + '{"name": "a2"}\n')
    with pytest.raises(ValueError, match=r"cases.jsonl:2: \S+ is missing"):
        list(read_stored(path))
