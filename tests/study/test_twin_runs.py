"""The twin of a run with prompts: recovery of known rates from requests with hits, and predictions of other runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from spanlab.cli import compose
from spanlab.study.run import run_study

from . import twin_logs
from .twin_logs import HYBRID, MODEL, RATES
from .twin_runs import Server, write_run

SLOW, FAST = (("arrivals=poisson", f"arrivals.rate_rps={rate}") for rate in (6, 11))
OTHER_PROMPTS = ("workload.synthetic.groups=20", "workload.synthetic.requests_per_group=6", "workload.output_tokens=20")
SMALL = Server(blocks=500)


def twin(root: Path, log: Path, *overrides: str, predict: tuple[Path, ...] = ()) -> dict[str, Any]:
    folders = f"twin.predict=[{','.join(map(str, predict))}]"
    return twin_logs.twin(root, log, "twin.draws=8", folders, *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Folders of runs of one server without noise."""
    root = tmp_path_factory.mktemp("runs")
    return {
        "fitted": write_run(root / "fitted", Server(), *SLOW),
        "load": write_run(root / "load", Server(), *FAST),
        "cache": write_run(root / "cache", SMALL, *SLOW),
        "workload": write_run(root / "workload", Server(), *SLOW, *OTHER_PROMPTS),
    }


@pytest.fixture(scope="module")
def known(runs, tmp_path_factory) -> dict[str, Any]:
    """Summary of the fit of one run that predicts the others."""
    others = tuple(folder for name, folder in runs.items() if name != "fitted")
    return twin(tmp_path_factory.mktemp("known"), runs["fitted"], predict=others)


def test_steps_with_hits_give_the_known_rates(known):
    for name, parameter in known["parameters"].items():
        assert parameter["low"] <= getattr(RATES, name) <= parameter["high"], name
    assert known["parameters"]["compute"]["value"] == pytest.approx(RATES.compute, rel=0.01)
    assert known["reuse"] == {"same": 120, "hit_rate": 0.8, "our_hit_rate": 0.8}
    assert known["unseen"]["ttft"]["p95_error"] < 0.001
    assert known["unseen"]["e2e"]["p95_error"] < 0.001


@pytest.mark.parametrize("name", ["load", "cache", "workload"])
def test_another_run_is_predicted(name: str, known):
    (run,) = [found for found in known["predictions"] if found["run"] == name]
    assert run["differs"] == name
    assert run["same_reuse"] == run["requests"] == 120
    assert run["hit_rate"] == run["our_hit_rate"]
    for metric in ("ttft", "e2e"):
        errors, tokens = run["errors"]["twin"][metric], run["errors"]["tokens"][metric]
        assert abs(errors["mean_error"]) < 0.005
        assert errors["p50_error"] < 0.002
        assert errors["p95_error"] < 0.03
        assert errors["p50_error"] < tokens["p50_error"] / 10
    assert run["floor"] is None


def test_a_smaller_cache_has_fewer_hits(known):
    rates = {run["run"]: run["hit_rate"] for run in known["predictions"]}
    assert rates["cache"] < 0.7 < rates["load"]


def test_settings_of_the_server_are_read_from_its_steps(known):
    assert known["server"]["twin.num_gpu_blocks"] == "2000 (the server's log of steps)"
    assert known["server"]["batch.max_num_seqs"] == "16 (the server's log of steps)"
    assert known["server"]["twin.cuda_graphs"] == "False (default)"


def test_times_of_requests_with_hits_give_the_known_rates(runs, tmp_path: Path):
    """Without a log of steps; the slopes of request times count the computed tokens only."""
    store = f"store.kv_gib={500 * 16 * 131072 / 2**30}"
    fitted = write_run(tmp_path / "fitted", SMALL, *SLOW, store, steps=False)
    summary = twin(tmp_path, fitted, "twin.cuda_graphs=false", predict=(runs["load"],))
    assert summary["steps_fitted"] is None
    assert summary["server"]["twin.num_gpu_blocks"] == "500 (the run's settings)"
    assert summary["reuse"]["same"] >= 115
    compute = summary["parameters"]["compute"]
    assert compute["low"] <= RATES.compute <= compute["high"]
    assert compute["value"] == pytest.approx(RATES.compute, rel=0.05)
    (run,) = summary["predictions"]
    assert run["same_reuse"] >= 115
    assert abs(run["errors"]["twin"]["e2e"]["mean_error"]) < 0.05


def test_intervals_cover_drawn_step_times(tmp_path: Path):
    """Steps vary by 8 %, as known; a repeat with other draws is the floor of another."""
    draws = [Server(noise=0.08, seed=seed) for seed in range(4)]
    fitted = write_run(tmp_path / "fitted", draws[0], *SLOW)
    others = tuple(write_run(tmp_path / f"load{seed}", draws[seed], *FAST) for seed in (1, 2, 3))
    summary = twin(tmp_path, fitted, "twin.draws=20", predict=others)
    covered = [run["covered"][metric] for run in summary["predictions"] for metric in ("ttft", "e2e")]
    assert 0.8 < sum(covered) / len(covered) < 0.99
    for run in summary["predictions"]:
        assert run["repeats"] == 2
        assert run["errors"]["twin"]["e2e"]["p50_error"] < 1.2 * run["floor"]["e2e"]["p50_error"]


def test_errors_of_a_machine_whose_speed_varies_are_told_apart(runs, tmp_path: Path):
    slower = write_run(tmp_path / "slower", Server(swing=0.3), *FAST)
    (run,) = twin(tmp_path, runs["fitted"], predict=(slower,))["predictions"]
    assert 1.0 < run["slowness"] < 1.3
    for metric in ("ttft", "e2e"):
        predicted, at_speed = run["errors"]["twin"][metric], run["at_speed"][metric]
        assert abs(at_speed["mean_error"]) < abs(predicted["mean_error"]) / 3
        assert at_speed["p50_error"] < predicted["p50_error"] / 2


def test_hybrids_with_hits_are_predicted(tmp_path: Path):
    words = (f"model={HYBRID}", "arms.vllm_0_32.pool.block_size=528")
    prompts = ("workload.synthetic.prompt_tokens=1800", "workload.synthetic.value=1600")
    large, small = Server(blocks=200, block_size=528), Server(blocks=44, block_size=528)
    fitted = write_run(tmp_path / "fitted", large, *words, *prompts, *SLOW)
    other = write_run(tmp_path / "other", small, *words, *prompts, *SLOW)
    summary = twin(tmp_path, fitted, f"model={HYBRID}", predict=(other,))
    assert 0.5 < summary["reuse"]["hit_rate"] == summary["reuse"]["our_hit_rate"]
    (run,) = summary["predictions"]
    assert run["same_reuse"] == run["requests"]
    assert run["hit_rate"] < 0.8 * summary["reuse"]["hit_rate"]
    assert abs(run["errors"]["twin"]["ttft"]["mean_error"]) < 0.01
    assert run["errors"]["twin"]["ttft"]["p50_error"] < 0.005


def test_a_run_of_earlier_versions_is_aligned_by_its_queue(runs, tmp_path: Path):
    """Records without times of sending, and a run without its start on the clock of the steps."""
    old = write_run(tmp_path / "old", Server(before_s=0.0), *SLOW, drop=("sent_s",))
    path = old / "runs" / "vllm_0_32.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"began_s": None}) + "\n")
    summary = twin(tmp_path, old)
    assert summary["unseen"]["ttft"]["p95_error"] < 0.001


@pytest.fixture
def copy(runs, tmp_path: Path) -> Path:
    """A copy of the fitted run, to be changed."""
    return Path(shutil.copytree(runs["fitted"], tmp_path / "copy"))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["twin.num_gpu_blocks=9"],
            "twin.num_gpu_blocks=9: expected 2000, as the server's log of steps has it, or null",
        ),
        (["arms.vllm_0_32.pool.block_size=32"], "pool.block_size=32: expected 16, as the server's log"),
        (["model=llama-3.2-1b"], "log=.*: its server had model.name=llama-3.1-8b; expected llama-3.2-1b"),
        (["model.kv_itemsize=1"], "log=.*: its server had model.kv_itemsize=2; expected 1"),
        (["twin.train_share=0.9"], "twin.train_share=0.9 of 120 requests in log=.*: expected 15 requests"),
    ],
)
def test_settings_that_differ_from_the_server_are_refused(overrides, message: str, runs, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        twin(tmp_path, runs["fitted"], *overrides)


def test_the_fitted_run_is_not_predicted(runs, copy: Path, tmp_path: Path):
    for folder in (runs["fitted"], copy):
        with pytest.raises(
            ValueError, match=r"twin.predict=.*: expected another run than the fitted one, and each one"
        ):
            twin(tmp_path, runs["fitted"], predict=(folder,))


def test_a_folder_without_prompts_is_refused(runs, tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"twin.predict=.*: expected the folder of a run of replay or rendezvous, whose"
    ):
        twin(tmp_path, runs["fitted"], predict=(tmp_path,))
    lengths = runs["fitted"] / "records" / "vllm_0_32.jsonl"
    with pytest.raises(
        ValueError, match=r"twin.predict=.* with log=.*: expected a log with prompts, as in the folder of"
    ):
        twin(tmp_path, lengths, predict=(runs["load"],))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value: 1200.0", "value: 1100.0", "its workload has other prompts now; expected those that the server got"),
        ("groups: 8", "groups: 0", "expected settings that this version knows: .*groups=0"),
    ],
)
def test_settings_of_another_run_are_refused(old: str, new: str, message: str, copy: Path, tmp_path: Path):
    change(copy / "config.yaml", old, new)
    with pytest.raises(ValueError, match=f"log=.*copy: {message}"):
        twin(tmp_path, copy)


def test_a_simulated_run_is_refused(tmp_path: Path):
    small = ("workload.documents=4", "workload.questions_per_document=4", "only=[none]", "arms=attention")
    words = (f"model={MODEL}", "load.rates_rps=[]", "load.arms=[]", "tracking.kind=none", "output.figures=false")
    run = run_study(compose("synthetic_sim", [*small, *words]), "synthetic_sim", tmp_path, show=False)
    with pytest.raises(ValueError, match=r"log=.*: a run with backend=sim; expected one of a server, backend=server"):
        twin(tmp_path, run)


def test_a_prompt_that_the_server_did_not_get_is_named(copy: Path, tmp_path: Path):
    (path,) = (copy / "steps").iterdir()
    lines = path.read_text().splitlines()
    event = json.loads(lines[1])
    lines[1] = json.dumps(event | {"tokens": [*event["tokens"][:-1], 5]})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=f"request {event['id']} had another prompt; expected that of the workload"):
        twin(tmp_path, copy)


def test_failed_requests_are_refused(copy: Path, tmp_path: Path):
    change(copy / "runs" / "vllm_0_32.jsonl", '"failures":{}', '"failures":{"3":"no connection"}')
    with pytest.raises(ValueError, match=r"log=.*: 1 requests failed; expected none"):
        twin(tmp_path, copy)


def test_a_server_that_tells_no_reuse_is_refused(tmp_path: Path):
    run = write_run(tmp_path / "run", Server(), *SLOW, steps=False)
    path = run / "records" / "vllm_0_32.jsonl"
    rows = [json.loads(line) | {"reused_tokens": None} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = json.loads((run / "runs" / "vllm_0_32.jsonl").read_text())
    (run / "runs" / "vllm_0_32.jsonl").write_text(json.dumps(row | {"records_end": path.stat().st_size}) + "\n")
    with pytest.raises(ValueError, match=r"the server told no reused tokens; expected cached_tokens or its steps"):
        twin(tmp_path, run)


def test_sums_of_a_run_with_prompts_are_compared(runs, tmp_path: Path):
    """The scrape of the fitted run: delays of the client are outside of the server's times, and reuse is compared."""
    rows = [json.loads(line) for line in (runs["fitted"] / "records" / "vllm_0_32.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in next((runs["fitted"] / "steps").iterdir()).read_text().splitlines()]
    added = {event["id"]: event["at"] for event in events if event["event"] == "add"}
    queue, prefill, decode = sums_of(events, added)
    outside_s = Server.before_s + Server.after_s
    e2e = sum(row["finished_s"] - row["arrived_s"] - outside_s for row in rows)
    histograms = {"request_queue_time": queue, "request_prefill_time": prefill, "request_decode_time": decode}
    histograms |= {"e2e_request_latency": e2e}
    text = [f"vllm:{name}_seconds_sum {seconds}" for name, seconds in histograms.items()]
    text += [f"vllm:{name}_seconds_count {len(rows)}" for name in histograms]
    text += [f"vllm:prefix_cache_hits_total {sum(row['reused_tokens'] for row in rows)}"]
    scrape = tmp_path / "end.prom"
    scrape.write_text("\n".join(text))
    summary = twin(tmp_path, runs["fitted"], f"twin.metrics=[{scrape}]")
    errors = {row["time"]: row["error"] or 0.0 for row in summary["sums"]}
    assert errors == dict.fromkeys(("queue", "prefill", "decode", "E2E latency"), pytest.approx(0, abs=0.01))
    (counts,) = summary["counts"]
    assert counts["server"] == counts["simulated"] > 0


def sums_of(events: list[dict[str, Any]], added: dict[str, int]) -> list[float]:
    """Seconds of all requests together: waiting, until the first token, and until the last one."""
    began, ended, planned = {}, {}, []
    for event in events:
        if event["event"] == "plan" and event["tokens"]:
            planned.append(event)
            began |= {name: event["began"] for name in event["tokens"] if name not in began}
        elif event["event"] == "done" and planned:
            planned.pop(0)
            for name in event["tokens"]:
                ended.setdefault(name, []).append(event["at"])
    waits = [began[name] - at for name, at in added.items()]
    firsts = [ended[name][0] - began[name] for name in added]
    rests = [ended[name][-1] - ended[name][0] for name in added]
    return [sum(values) * 1e-9 for values in (waits, firsts, rests)]
