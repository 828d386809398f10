"""The analysis `twin`: recovery of known rates, caveats of unidentified ones, and prediction of real logs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.analyses.twin_fit import predictions_without_model
from spanlab.analyses.twin_log import TimedLog, server_of
from spanlab.cli import compose
from spanlab.study.run import run_study
from spanlab_sim.lockstep import Memory
from spanlab_sim.timings import Rates

from ..support.files import write_lines
from ..support.shared import TRACES, needs
from .twin_logs import DEVICE, EXPERTS, GIVEN, HYBRID, LIMITS, MEMORY, OF_SERVER, RATES, served, twin, write

LOGS = TRACES / "llmservingsim-vllm-groundtruth" / "RTXPRO6000"


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The folder and the summary of a log with known rates and without a scheduling mode."""
    root = tmp_path_factory.mktemp("known")
    return root, twin(root, write(root / "log", served()))


def test_known_rates_lie_within_their_intervals(known):
    _, summary = known
    parameters = summary["parameters"]
    assert {name for name, parameter in parameters.items() if parameter["identified"]} >= {"compute", "bandwidth"}
    for name, parameter in parameters.items():
        assert parameter["low"] <= getattr(RATES, name) <= parameter["high"], name
    for name in ("compute", "bandwidth"):
        assert parameters[name]["value"] == pytest.approx(getattr(RATES, name), rel=0.15)


def test_unseen_requests_of_a_known_server_are_predicted(known):
    _, summary = known
    assert (summary["split"]["train"], summary["split"]["test"]) == (60, 60)
    assert abs(summary["unseen"]["ttft"]["mean_error"]) < 0.02
    assert summary["unseen"]["ttft"]["p50_error"] < 0.08  # a first token may miss a step; 0.01 to 0.06 for other draws
    assert summary["unseen"]["e2e"]["p50_error"] < 0.01
    assert summary["unseen"]["e2e"]["p95_error"] < 0.03


def test_the_fit_reads_no_time_of_test_requests(known, tmp_path: Path):
    """Other times of the second half, of its queueing too, leave every parameter as it was."""
    _, summary = known
    random, rows = np.random.default_rng(0), served()
    for row in rows[60:]:
        first, last = random.uniform(0.1, 9, 2)
        row["first_token_ts"], row["last_token_ts"] = row["queued_ts"] + first, row["queued_ts"] + first + last
    changed = twin(tmp_path, write(tmp_path / "log", rows))
    assert changed["parameters"] == summary["parameters"]
    assert changed["unseen"] != summary["unseen"]


def test_clocks_are_aligned_by_fitted_requests(known, tmp_path: Path):
    _, summary = known
    rows = served()
    for row in rows[60:]:
        row["queued_ts"] -= 0.05
    changed = twin(tmp_path, write(tmp_path / "log", rows))
    for name, parameter in summary["parameters"].items():
        assert changed["parameters"][name]["value"] == pytest.approx(parameter["value"], rel=1e-4), name
    assert any("of the fitted requests" in caveat for caveat in summary["caveats"])


def test_the_way_to_the_server_is_no_time_of_the_server(tmp_path: Path):
    """A client that is 0.2 s away reports the times of the server too, as vLLM 0.33 lets it."""
    rows, way_s = served(), 0.2
    arrived, first, last = (
        np.array([row[name] for row in rows]) for name in ("queued_ts", "first_token_ts", "last_token_ts")
    )
    result = {
        "input_lens": [row["input_toks"] for row in rows],
        "output_lens": [row["output_toks"] for row in rows],
        "start_times": (arrived - way_s).tolist(),
        "ttfts": (first - arrived + way_s).tolist(),
        "itls": [[gap] for gap in (last - first).tolist()],
        "server_ttfts": (first - arrived).tolist(),
        "server_queue_times": [0.0] * len(rows),
    }
    write_lines(tmp_path / "result.json", result)
    limits = [f"batch.{name}={limit}" for name, limit in LIMITS.items()]
    limits += [f"twin.num_gpu_blocks={MEMORY.blocks + 1}", "twin.async_scheduling=true"]
    summary = twin(tmp_path, tmp_path / "result.json", *limits)
    assert summary["parameters"]["compute"]["value"] == pytest.approx(RATES.compute, rel=0.15)
    assert abs(summary["unseen"]["ttft"]["mean_error"]) < 0.02
    assert summary["unseen"]["ttft"]["p50_error"] < 0.05


def test_predictors_without_a_model_see_fitted_requests_only():
    """TTFT and E2E that are linear in what the line reads are predicted exactly; the others by hand."""
    numbers, outputs = np.arange(6), np.array([3, 5, 4, 9, 2, 7])
    ttft, trains = 2.0 + 0.5 * numbers, numbers < 4
    e2e = 4.0 + 1.5 * numbers + 0.25 * outputs
    log = TimedLog((), numbers * 1.0, ttft, e2e, outputs, trains)
    predicted = predictions_without_model(log)
    np.testing.assert_allclose(predicted["line"]["ttft"], ttft, rtol=1e-12)
    np.testing.assert_allclose(predicted["line"]["e2e"], e2e, rtol=1e-12)
    np.testing.assert_allclose(predicted["mean"]["ttft"], 2.75)
    np.testing.assert_allclose(predicted["last"]["e2e"], 4 + 4.5 + 2.25)
    other = replace(log, ttft_s=np.where(trains, ttft, 99.0), e2e_s=np.where(trains, e2e, 999.0))
    for name, by_metric in predictions_without_model(other).items():
        for metric, values in by_metric.items():
            np.testing.assert_array_equal(values, predicted[name][metric])


def test_every_metric_has_rows_without_a_model(known):
    root, summary = known
    lines = (root / "twin" / "x" / "tables" / "twin.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == ["twin", "line", "mean", "last value"] * 3
    assert abs(summary["unseen"]["e2e"]["p50_error"]) < summary["without_model"]["line"]["unseen"]["e2e"]["p50_error"]


def test_scheduling_and_memory_come_from_the_log(known):
    _, summary = known
    assert summary["server"]["twin.async_scheduling"] == "True (fits better)"
    assert summary["server"]["batch.max_num_seqs"] == "16 (meta.json)"
    assert summary["blocks"]["usable"] == 2500
    assert any("clocks of their own" in caveat for caveat in summary["caveats"])


def test_the_profile_serves_another_study(known, tmp_path: Path):
    root, _ = known
    workload = ("workload.documents=4", "workload.questions_per_document=2", "only=[none]", "load.rates_rps=[]")
    fitted = (f"timing.profile={root / 'twin' / 'x' / 'profile.json'}", "timing=fitted", "tracking.kind=none")
    study = compose(
        "synthetic_sim", [*GIVEN, *workload, *fitted, "arms=attention", "load.arms=[]", "analyses=[summary]"]
    )
    folder = run_study(study, "synthetic_sim", tmp_path, show=False)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert summary["timing"] == "fitted"
    (arm,) = summary["arms"].values()
    assert arm["tpot_s"]["mean"] > 0.8 * 16.06e9 / 1008e9 / RATES.bandwidth  # weights of 16 GB, read once per token


def test_unidentified_parameters_are_reported(known):
    """Ten microseconds per sequence are negligible in steps of twenty milliseconds."""
    _, summary = known
    parameter = summary["parameters"]["host_s_per_sequence"]
    assert not parameter["identified"]
    assert parameter["high"] / parameter["low"] > 4
    assert parameter["value"] == pytest.approx(1e-5, rel=0.5)  # the prior mean
    assert any(caveat.startswith("host_s_per_sequence is not identified by this log") for caveat in summary["caveats"])


def test_planning_that_the_log_names_is_not_fitted(tmp_path: Path):
    log = write(tmp_path / "log", served(60), async_scheduling=False)
    summary = twin(tmp_path, log, "twin.cuda_graphs=false", "batch.max_num_seqs=20")
    assert summary["server"]["twin.async_scheduling"] == "False (meta.json)"
    assert summary["server"]["twin.cuda_graphs"] == "False (set)"
    assert summary["server"]["batch.max_num_seqs"] == "20 (set)"


def test_collectives_are_fitted_between_two_devices(tmp_path: Path):
    rates = Rates(0.5, 0.9, 0.004, 2e-5, 0.006, collective_s=1e-4, link_bytes_per_s=5e9)
    rows = served(80, rates=rates, tensor_parallel=2)
    log = write(tmp_path / "log", rows, tensor_parallel_size=2, async_scheduling=True)
    summary = twin(tmp_path, log)
    assert summary["deployment"]["tensor_parallel"] == 2
    link = summary["parameters"]["link_bytes_per_s"]
    assert link["low"] <= 5e9 <= link["high"]
    assert summary["unseen"]["e2e"]["p50_error"] < 0.02


def test_ranks_that_share_experts_are_fitted(tmp_path: Path):
    settings = (f"model={EXPERTS}", "hardware=rtxpro6000")
    rows = served(60, settings=settings, rates=Rates(0.5, 0.9, 0.004), data_parallel=2)
    log = write(tmp_path / "log", rows, data_parallel_size=2, async_scheduling=True)
    summary = twin(tmp_path, log, *settings)
    assert summary["deployment"]["data_parallel"] == 2
    assert summary["parameters"]["bandwidth"]["value"] == pytest.approx(0.9, rel=0.15)
    assert summary["unseen"]["e2e"]["p50_error"] < 0.02


@pytest.mark.parametrize(
    "caches", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["states on boundaries", "no prefix caching"]
)
def test_hybrids_are_fitted_in_either_layout_of_their_states(caches, tmp_path: Path):
    """With few blocks, so that requests wait for the memory that states take."""
    settings = (f"model={HYBRID}", f"hardware={DEVICE}")
    memory = Memory(44, 528, 1, 3, caches)
    rows = served(settings=settings, memory=memory)
    log = write(tmp_path / "log", rows, memory, async_scheduling=True, enable_prefix_caching=caches)
    summary = twin(tmp_path, log, *settings)
    assert summary["server"]["twin.prefix_caching"] == f"{caches} (meta.json)"
    assert summary["blocks"]["most_used"] > 40
    bandwidth = summary["parameters"]["bandwidth"]
    assert bandwidth["low"] <= RATES.bandwidth <= bandwidth["high"]
    assert abs(summary["unseen"]["ttft"]["mean_error"]) < 0.02
    assert summary["unseen"]["e2e"]["p50_error"] < 0.01


def bad(change: dict[str, Any], index: int = 30) -> list[dict[str, Any]]:
    rows = served(60)
    rows[index] = rows[index] | change
    return rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_token_ts": None}, ":31: first_token_ts: expected a time, and it is missing"),
        ({"first_token_ts": 1.0}, ":31: first_token_ts: expected a time no earlier than the one before it, 5006.48"),
        ({"last_token_ts": 1.0}, ":31: last_token_ts: expected a time no earlier than the one before it, 5006.53"),
        ({"output_toks": 0}, ":31: output_toks: expected 1 or more"),
        ({"input_toks": 60_000}, "expected at least 37[0-9][0-9], for request 30 of log=.* alone holds 60,"),
    ],
)
def test_a_bad_line_is_refused_in_a_sentence(change, message, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        twin(tmp_path, write(tmp_path / "log", bad(change)))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("[1]", "expected an object, not .1.; expected vLLM's settings as JSON"),
        ('{"kv_cache": {"block_size": true}}', "kv_cache.block_size=True: expected a whole number"),
        ('{"kv_cache": {"block_size": 0}}', "kv_cache.block_size=0: expected a number above zero"),
        ('{"kv_cache": {"num_gpu_blocks": [9]}}', r"kv_cache.num_gpu_blocks=\[9\]: expected a whole number"),
        ('{"engine_kwargs": {"quantization": ["fp8"]}}', r"engine_kwargs.quantization=\['fp8'\]: expected a text"),
        ('{"engine_kwargs": {"max_num_seqs": "9"}}', "engine_kwargs.max_num_seqs=9: expected a whole number"),
        ('{"engine_kwargs": {"async_scheduling": 1}}', "engine_kwargs.async_scheduling=1: expected true or false"),
    ],
)
def test_settings_of_the_server_that_cannot_be_are_named(meta: str, message: str, tmp_path: Path):
    (write(tmp_path, []) / "meta.json").write_text(meta)
    with pytest.raises(ValueError, match=f"meta.json: {message}"):
        server_of(compose("twin", [f"log={tmp_path}", *OF_SERVER]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backend=engine"], "backend=engine with analyses=twin: expected sim"),
        (["store.total_gib=3"], "store.total_gib=3.0 with analyses=twin: expected None"),
        (["twin.train_share=0"], "twin.train_share=0.0: expected a number above zero"),
        (
            ["store.kv_gib=3", "twin.num_gpu_blocks=9"],
            "store.kv_gib=3.0 with twin.num_gpu_blocks: expected one of them",
        ),
        (["twin.weights=fp4"], "twin.weights=fp4: expected"),
    ],
)
def test_settings_that_make_no_sense_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        compose("twin", ["log=x", *overrides])


def test_its_keys_are_refused_elsewhere():
    with pytest.raises(ValueError, match=r"twin\.\w+=.* with analyses=.*: expected twin among them"):
        compose("explain", ["twin.tensor_parallel=2"])


def test_a_log_without_times_is_refused(tmp_path: Path):
    rows = ({"input_toks": 9, "output_toks": 2, "arrival_time": index} for index in range(50))
    path = write_lines(tmp_path / "log.jsonl", *rows)
    with pytest.raises(ValueError, match="expected times of arrival, first and last token of every request"):
        twin(tmp_path, path)


def test_fitted_requests_of_one_token_are_refused(tmp_path: Path):
    rows = [row | ({"output_toks": 1} if index < 30 else {}) for index, row in enumerate(served(60))]
    with pytest.raises(ValueError, match=r"output_toks=1 of all fitted requests in log=.*: expected 2 or more"):
        twin(tmp_path, write(tmp_path / "log", rows))


def test_too_few_requests_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"of 28 requests in log=.*: expected 15 requests or more on either side"):
        twin(tmp_path, write(tmp_path / "log", served(28)))


@needs(LOGS)
def test_a_recorded_log_is_predicted(tmp_path: Path):
    summary = twin(tmp_path, LOGS / "Llama-3.1-8B", "hardware=rtxpro6000")
    ttft, e2e = summary["unseen"]["ttft"], summary["unseen"]["e2e"]
    assert abs(ttft["mean_error"]) < 0.02
    assert (ttft["p50_error"] < 0.03, ttft["p95_error"] < 0.10) == (True, True)
    assert (e2e["p50_error"] < 0.02, e2e["p95_error"] < 0.06) == (True, True)


@needs(LOGS)
def test_times_of_a_recorded_log_are_read():
    from spanlab.workloads.logs.read import LogSettings, read_log

    log = read_log(LOGS / "Llama-3.1-8B", LogSettings())
    assert log.observed is not None
    assert float((log.observed.first_token - log.arrived_ns * 1e-9).mean()) == pytest.approx(7.12, abs=0.01)
