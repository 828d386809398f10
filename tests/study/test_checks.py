"""Refused before a study runs: missing packages, and stores without room."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest

from spanlab.build import build_policy, build_timing, build_workload
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.model_spec import DeviceRates
from spanlab.study import machine
from spanlab.study.jobs import build_arrivals
from spanlab.study.machine import EngineFacts
from spanlab.study.prepare import arrival_note, check_context, check_device, check_fit, check_memory, check_packages

GIB = 1 << 30
CARD = EngineFacts(
    kind="cuda",
    device="NVIDIA Any",
    memory_bytes=80 * GIB,
    model="llama-3.1-8b",
    weights="random",
    dtype="bfloat16",
    context=8192,
    versions={"torch": "2"},
    threads=1,
    rates=DeviceRates(1e15, 3e12),
)


@pytest.fixture
def without(monkeypatch):
    """Let this environment lack packages, as the simulator's lacks torch."""

    def lack(*names: str) -> None:
        def version(name: str) -> str:
            if name in names:
                raise PackageNotFoundError(name)
            return "1"

        monkeypatch.setattr(machine, "version", version)

    return lack


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_only_engine_studies_need_the_engine_packages(package: str, without):
    without(package)
    with pytest.raises(ValueError, match=rf"^backend=engine: the package {package} is not .* `bash runall.sh -cn "):
        check_packages(compose("pic_clean", ["tracking=none"]))
    check_packages(compose("pic_clean", ["tracking=none", "backend=sim"]))


def test_a_tracker_without_its_package_gives_one_sentence(without):
    without("wandb")
    with pytest.raises(ValueError, match=r"^tracking.kind=wandb: the package wandb is not .*, or tracking=none$"):
        check_packages(compose("smoke", ["tracking=wandb"]))
    check_packages(compose("smoke", ["tracking=none"]))


def test_a_store_that_the_real_card_lacks_gets_both_numbers():
    study = compose("pic_clean", ["device=cuda", "size=full_attention", "store.total_gib=70"])
    check_memory(study)  # of the card that the settings name
    with pytest.raises(
        ValueError, match=r"^store of 70 GiB on NVIDIA Any: expected at most 65.042 GiB, because it has 80"
    ):
        check_device(study, CARD)
    study.store.total_gib = 64
    check_device(study, CARD)
    study.store.total_gib = None
    check_device(study, CARD)


def test_a_passage_longer_than_the_context_gets_a_sentence():
    study = compose("pic_answers", ["local=mine.jsonl"])
    passage, question = Span(np.zeros(8000, np.int32), independent=True), Span(np.zeros(190, np.int32))
    fits = Request(2, 0, (passage, question), output_len=3)
    check_context(study, CARD, (fits,))
    with pytest.raises(
        ValueError,
        match=r"^workload\.path=mine\.jsonl: expected prompts of at most 8,192 tokens with their answers, the "
        r"positions that llama-3\.1-8b supports; request 3 has 8,193, 8,000 of them in one passage$",
    ):
        check_context(study, CARD, (fits, replace(fits, id=3, output_len=4)))


def test_the_facts_of_a_processor_are_its_own():
    pytest.importorskip("torch")
    facts = machine.engine_facts(compose("pic_clean", ["engine.threads=1"]))
    assert (facts.kind, facts.model, facts.weights, facts.dtype) == ("cpu", "tiny", "random", "float32")
    assert facts.device.endswith(", 1 thread")
    assert facts.context == 65536
    assert 0 < facts.memory_bytes <= machine.host_memory()
    assert {"torch", "transformers"} <= set(facts.versions)
    assert facts.line().startswith(f"engine, measured on {facts.device}, random weights in float32, torch ")


def test_a_card_that_is_not_there_has_no_facts():
    pytest.importorskip("torch")
    with pytest.raises(
        ValueError, match=r"^engine\.device is 'cuda:97', expected one of this machine's \d+ CUDA devices"
    ):
        machine.engine_facts(compose("pic_clean", ["engine.device=cuda:97"]))


@pytest.mark.parametrize("arm", ["none", "boundary", "balanced_12"])
@pytest.mark.parametrize("extra_bytes", [0, 1])
def test_a_store_for_one_request_and_its_state_serves_them_all(arm: str, extra_bytes: int):
    """To the byte: a byte less is refused. One state more, and those that are stored may be in each other's way."""
    from spanlab_sim.run import simulate

    study = compose("quality_clean", ["backend=sim", "workload.documents=2", "workload.max_prompt_tokens=512"])
    requests = build_workload(study.workload, "unused").requests
    model, strategy = study.model, study.arms[arm]
    tokens = max(request.num_tokens + request.output_len - 1 for request in requests)
    least = tokens * model.kv_bytes_per_token + model.state_bytes
    study.runs.only, study.store.total_gib = [arm], (least - 1) / GIB
    with pytest.raises(ValueError, match=rf"^store.total_gib=.*may hold {tokens} tokens of tiny-hybrid and a state$"):
        check_fit(study, requests)
    study.store.total_gib = (least + extra_bytes * model.state_bytes) / GIB
    check_fit(study, requests)
    policy = build_policy(study, strategy, 0, tokens)
    records: list = []
    arrived = build_arrivals(study, requests, 0, 100.0)
    simulate(arrived, policy, study.batch, build_timing(study), records.append)
    policy.check()
    assert len(records) == len(requests)


def test_unused_recorded_times_are_reported(tmp_path):
    study = compose("smoke", ["arrivals.rate_rps=2", "workload.documents=1", "workload.questions_per_document=2"])
    requests = build_workload(study.workload, str(tmp_path)).requests
    assert arrival_note(study, requests) is None
    timed = tuple(replace(request, arrived_at=index) for index, request in enumerate(requests))
    assert "the recorded times are not used" in arrival_note(study, timed)
    recorded = compose("smoke", ["arrivals=as_given", "arrivals.rate_rps=null", "load.rates_rps=[]"])
    assert arrival_note(recorded, timed) is None


def test_an_empty_list_of_rates_switches_the_load_study_off():
    study = compose("quality_sim", ["load.rates_rps=[]", "~arms.boundary"])
    assert study.runs.load.arms == ["none", "block_512", "boundary"]
