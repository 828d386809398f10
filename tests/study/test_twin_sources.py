"""Further sources of the twin's timings: forwards of exact batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spanlab.analyses.twin_forward import read_forwards
from spanlab.cli import compose
from spanlab.study.run import run_study
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab_sim.timings import Deployment, Rates

from .forward_results import CASES, case, forward_s, write_forwards
from .twin_logs import DEVICE, EXPERTS, MODEL, RATES, served, write

GIVEN = ("output.figures=false", "output.run=x", f"model={MODEL}", f"hardware={DEVICE}")
STUDY = compose("twin", [f"model={MODEL}", f"hardware={DEVICE}", "log=none.jsonl"])
ONE = Deployment()


def twin(root: Path, log: Path, *overrides: str) -> dict[str, Any]:
    study = compose("twin", [*GIVEN, f"log={log}", *overrides])
    summary: dict[str, Any] = json.loads((run_study(study, "twin", root, show=False) / "summary.json").read_bytes())
    return summary


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
