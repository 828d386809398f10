"""Further sources of the twin's timings: forwards of exact batches, and sums that a server reports."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spanlab.analyses.twin_forward import read_forwards
from spanlab.analyses.twin_metrics import read_sums
from spanlab.cli import compose
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab_sim.timings import Deployment, Rates

from ..support.files import write_lines
from .forward_results import CASES, case, forward_s, write_forwards
from .metrics_scrapes import scrape, write_scrapes
from .twin_logs import DEVICE, EXPERTS, LIMITS, MEMORY, OF_SERVER, RATES, lines, served, simulated, twin, write

STUDY = compose("twin", [*OF_SERVER, "log=none.jsonl"])
ONE = Deployment()


# ------------------------------------------------------------------------------
# vllm bench forward.
# ------------------------------------------------------------------------------


def timed(name: str, rates: Rates = RATES, **changes: Any) -> dict[str, Any]:
    seconds = forward_s(STUDY.model, STUDY.hardware, rates, CASES[name])
    return case(name, CASES[name], seconds, **changes)


def test_a_forward_is_a_step_without_logits_and_host(tmp_path: Path):
    forwards = read_forwards([str(write_forwards(tmp_path / "f.json", *map(timed, CASES)))], STUDY.model, ONE)
    assert forwards is not None
    modelled = forwards.modelled(STUDY.model, STUDY.hardware, ONE, RATES)
    assert modelled == pytest.approx(forwards.seconds, rel=1e-9)
    assert [work.prefill_tokens for work in forwards.work] == [4096, 512, 1024, 0, 0, 0]
    assert [work.num_decodes for work in forwards.work] == [0, 0, 16, 1, 64, 256]


def test_forwards_determine_what_the_log_does_not(tmp_path: Path):
    """Prompts of few tokens, one request at a time: their steps move weights, and hardly compute."""
    log = write(tmp_path / "log", served(requests=60, rate_rps=0.2, longest=8))
    file = write_forwards(tmp_path / "forward.json", *map(timed, CASES))
    alone = twin(tmp_path / "alone", log)
    summary = twin(tmp_path / "both", log, f"twin.forward=[{file}]")
    known, compute = (each["parameters"]["compute"] for each in (alone, summary))
    assert known["high"] / known["low"] > 2  # as wide as what is assumed before
    assert compute["high"] / compute["low"] < 1.2
    assert compute["value"] == pytest.approx(RATES.compute, rel=0.03)
    assert summary["parameters"]["bandwidth"]["value"] == pytest.approx(RATES.bandwidth, rel=0.03)
    assert [row["case"] for row in summary["forwards"]] == list(CASES)
    assert max(abs(row["error"]) for row in summary["forwards"]) < 0.05
    assert any("does not name its model" in caveat for caveat in summary["caveats"])


def test_forwards_that_are_no_steps_of_the_model_are_counted(tmp_path: Path):
    file = write_forwards(
        tmp_path / "f.json",
        timed("prefill"),
        timed("decode_1", timing_scope="target_and_drafter"),
        timed("decode_1", drafts=3),
        timed("hit", num_tokens=1024, num_local_tokens=1024, num_tokens_after_padding=1024),
        timed("mix", latency_us={"timer": "pipeline_correlated_gpu_events_rank_max"}),
        timed("decode_64", finite=False),
    )
    forwards = read_forwards([str(file)], STUDY.model, ONE)
    assert forwards is not None
    assert forwards.names == ("prefill",)
    assert forwards.notes[1:] == (
        "2 forwards with drafts or their model are left out",
        "1 forwards whose forward computed other tokens than those of its requests are left out",
        "1 forwards of pipeline stages are left out",
        "1 forwards whose forward gave numbers that are not finite are left out",
    )


@pytest.mark.parametrize(
    ("cases", "problem"),
    [
        ([], "expected a forward that can be fitted: the files are empty"),
        ([timed("mix", drafts=2)], "expected a forward that can be fitted: 1 forwards with drafts"),
        ([timed("mix", devices=2)], "mix ran on 2 devices; expected the 1 of twin.tensor_parallel"),
        ([{"case": "x", "requests": [], "ranks": []}], r"\[0\].requests=\[\]: expected one or more"),
        ([{"name": "x"}], r"\[0\].case is missing; expected the JSON that vllm bench forward"),
        ([timed("mix", latency_us={"median": 0.0})], "median=0.0: expected a number above zero"),
    ],
)
def test_results_without_forwards_to_fit_are_refused(cases: list[Any], problem: str, tmp_path: Path):
    file = write_forwards(tmp_path / "f.json", *cases)
    with pytest.raises(ValueError, match=re.escape("twin.forward=") + ".*" + problem):
        read_forwards([str(file)], STUDY.model, ONE)


def test_forwards_are_no_log(tmp_path: Path):
    file = write_forwards(tmp_path / "f.json", timed("mix"))
    with pytest.raises(ValueError, match=r"vllm bench forward, which has steps and no requests: twin\.forward reads"):
        read_log(file, LogSettings())


def test_experts_chosen_in_turn_are_no_choice_of_a_router(tmp_path: Path):
    file = write_forwards(tmp_path / "f.json", timed("mix", routing="balanced"), timed("hit"))
    study = compose("twin", [f"model={EXPERTS}", f"hardware={DEVICE}", "log=none.jsonl"])
    forwards = read_forwards([str(file)], study.model, ONE)
    assert forwards is not None
    assert forwards.names == ("hit",)
    assert "1 forwards with experts chosen by --routing balanced are left out" in forwards.notes


# ------------------------------------------------------------------------------
# Scrapes of /metrics.
# ------------------------------------------------------------------------------

LOG, TIMES = simulated(240, 4.0, RATES)
END_NS = float(TIMES.last_ns.max())
LIMITS_GIVEN = [f"batch.{name}={limit}" for name, limit in LIMITS.items()]
LIMITS_GIVEN += [f"twin.num_gpu_blocks={MEMORY.blocks + 1}", "twin.async_scheduling=true"]


def without_times(folder: Path) -> Path:
    """The requests of the log with arrivals and lengths alone."""
    rows = [{name: row[name] for name in ("input_toks", "output_toks", "arrival_time")} for row in lines(LOG, TIMES)]
    return write_lines(folder / "requests.jsonl", *rows)


def minutes(folder: Path, count: int = 12) -> str:
    """Names of the files of scrapes from before the first request to after the last one."""
    moments = [END_NS * number / count for number in range(count + 1)]
    paths = write_scrapes(folder, *(scrape(LOG, TIMES, moment, zero=7.0) for moment in moments))
    return f"twin.metrics=[{','.join(map(str, paths))}]"


def test_sums_of_many_intervals_give_the_known_rates(tmp_path: Path):
    summary = twin(tmp_path, without_times(tmp_path), minutes(tmp_path), *LIMITS_GIVEN)
    for name, parameter in summary["parameters"].items():
        assert parameter["low"] <= getattr(RATES, name) <= parameter["high"], name
    seen = {row["interval"]: row["seen"] for row in summary["sums"]}
    assert 4 <= sum(seen.values()) <= 8 <= len(seen)
    for row in summary["sums"]:
        if row["time"] in ("decode", "E2E latency"):  # another one at the end of an interval changes its waits more
            assert abs(row["error"]) < 0.02
    tests = [row for row in summary["sums"] if not row["seen"] and row["time"] == "E2E latency"]
    assert sum(row["requests"] for row in tests) + sum(
        row["requests"] for row in summary["sums"] if row["seen"] and row["time"] == "queue"
    ) == len(LOG)
    assert summary["means_s"] == {"ttft": None, "tpot": None, "e2e": None}
    assert any("no error of a request is known" in caveat for caveat in summary["caveats"])


def test_sums_only_test_a_fit_to_requests(tmp_path: Path):
    log = write(tmp_path / "log", lines(LOG, TIMES), async_scheduling=True)
    steps = sum(run.repeats for run in TIMES.runs if run.ranks[0].num_decodes or run.ranks[0].num_first_tokens)
    counts = {"iteration_tokens_total_count": steps, "num_preemptions_total": TIMES.preemptions}
    counts["prefix_cache_hits_total"] = 32
    (path,) = write_scrapes(tmp_path, scrape(LOG, TIMES, END_NS, **counts))
    alone, summary = twin(tmp_path / "alone", log), twin(tmp_path / "both", log, f"twin.metrics=[{path}]")
    assert summary["parameters"] == alone["parameters"]
    assert not any(row["seen"] for row in summary["sums"])
    errors = {row["time"]: row["error"] for row in summary["sums"]}
    assert abs(errors["decode"]) < 0.01
    assert {row["name"]: row["server"] for row in summary["counts"]} == {
        "steps with a token out": steps,
        "preemptions": TIMES.preemptions,
        "reused tokens": 32,
    }
    assert summary["counts"][0]["simulated"] == pytest.approx(steps, rel=0.02)
    assert any("the server reused 32 prompt tokens" in caveat for caveat in summary["caveats"])


def test_one_file_may_hold_several_scrapes(tmp_path: Path):
    texts = [scrape(LOG, TIMES, END_NS * share, zero=2.0) for share in (0.0, 0.4, 1.0)]
    (path,) = write_scrapes(tmp_path, "".join(texts))
    together, apart = read_sums([str(path)]), read_sums([*map(str, write_scrapes(tmp_path, *texts))])
    assert together is not None
    assert apart is not None
    assert together.intervals == apart.intervals
    assert [interval.requests for interval in together.intervals] == [
        int((TIMES.last_ns <= 0.4 * END_NS).sum()),
        int((TIMES.last_ns > 0.4 * END_NS).sum()),
    ]


def test_engines_of_one_server_are_summed(tmp_path: Path):
    text = scrape(LOG, TIMES, END_NS)
    (path,) = write_scrapes(tmp_path, text + text.replace('engine="0"', 'engine="1"'))
    sums = read_sums([str(path)])
    assert sums is not None
    assert sums.intervals[0].requests == 2 * len(LOG)
    assert sums.counts["prompt"] == 2 * sum(request.num_tokens for request in LOG)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["# nothing\n"], "no sample of a metric; expected scrapes of vLLM's /metrics"),
        (["sglang:cached_tokens_total 5\n"], "no sample of a metric; expected scrapes of vLLM's /metrics"),
        (["vllm:prefix_cache_hits_total 5\n"], "scrape 1 has no vllm:e2e_request_latency_seconds_count"),
        ([scrape(LOG, TIMES, END_NS), scrape(LOG, TIMES, 0)], "_count falls before scrape 2; expected scrapes of one"),
        ([scrape(LOG, TIMES, END_NS)] * 2, "no request finished between the scrapes"),
        (["vllm:prefix_cache_hits_total many\n"], "vllm:prefix_cache_hits_total=many: expected a number"),
        ([scrape(LOG, TIMES, 0) + scrape(LOG, TIMES, 0).replace('"m"', '"n"')], "models m, n"),
    ],
)
def test_scrapes_without_sums_are_refused(texts: list[str], problem: str, tmp_path: Path):
    with pytest.raises(ValueError, match=re.escape("twin.metrics=") + ".*" + problem):
        read_sums([*map(str, write_scrapes(tmp_path, *texts))])


@pytest.mark.parametrize(
    ("share", "change", "problem"),
    [
        (0.5, {}, r"requests finished between the scrapes; expected the 240 of log="),
        (1.0, {"input_toks": 5}, r"prompt tokens finished between the scrapes; expected the 1,200 of log="),
        (1.0, {"arrival_time": 1.7e9}, "expected the arrival time of every request, and one has none"),
        (1.0, {"output_toks": 0}, "expected the number of output tokens of every request, and one has none"),
    ],
)
def test_scrapes_of_other_requests_are_refused(share: float, change: dict[str, Any], problem: str, tmp_path: Path):
    rows = [json.loads(line) | change for line in without_times(tmp_path).read_text().splitlines()]
    log = write_lines(tmp_path / "requests.jsonl", *rows)
    (path,) = write_scrapes(tmp_path, scrape(LOG, TIMES, share * END_NS))
    with pytest.raises(ValueError, match=problem):
        twin(tmp_path, log, f"twin.metrics=[{path}]", *LIMITS_GIVEN)
