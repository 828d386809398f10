"""The entry `conformance`: built-in models pass, and a model that is broken on purpose fails."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spanlab import cli
from spanlab.cli import compose
from spanlab.engine.load import load_model
from spanlab.engine.model import SpanModel
from spanlab.engine.recurrent import SlotRef, StateScan, Windows
from spanlab.engine.request_state import RequestState
from spanlab.engine.scan import ScanInputs
from spanlab.engine.slots import Layers, StatePool
from spanlab.engine.states import ApplyMap, MapScan, StoreMap
from spanlab.study.conformance import PROPERTIES, Conformance, Subject, measure, run_conformance
from spanlab.study.verdicts import ABSENT, FAILED, PASSED, REFUSED, Measurement

SMALL = ["prompts=2", "output_tokens=4", "documents=2", "document_tokens=20", "engine.threads=1", "engine.device=cpu"]
OF_LOGITS = ("prefix_reuse", "chunked_prefill", "preemption", "span_reuse")


def settings(*overrides: str) -> Conformance:
    return compose("conformance", [*SMALL, *overrides])


@pytest.fixture(scope="module")
def model() -> SpanModel:
    """The built-in model, loaded once; not to be changed."""
    config = settings()
    return load_model(config.engine, config.model)


@pytest.fixture(scope="module")
def hybrid() -> SpanModel:
    """The built-in hybrid, loaded once; not to be changed."""
    config = settings("model=tiny-hybrid")
    return load_model(config.engine, config.model)


def verdicts(subject: Subject) -> dict[str, str]:
    return {name: measurement.verdict for name, measurement in measure(subject).items()}


@pytest.mark.parametrize(
    ("choice", "absent"),
    [("tiny", {"state_depth", "map_composition"}), ("tiny-hybrid", {"copy_on_write", "span_reuse"})],
)
def test_built_in_models_conform(choice: str, absent: set[str], tmp_path: Path):
    assert run_conformance(settings(f"model={choice}"), "run", tmp_path)
    properties = json.loads((tmp_path / "conformance/run/summary.json").read_bytes())["properties"]
    assert list(properties) == ["supported_layers", *settings(f"model={choice}").chosen]
    assert set(properties) == {"supported_layers", *PROPERTIES}
    assert {name for name, row in properties.items() if row["verdict"] == ABSENT} == absent
    assert all(row["verdict"] == PASSED for name, row in properties.items() if name not in absent)
    assert all(row["measured"] <= row["limit"] for name, row in properties.items() if name not in absent)


def test_a_wrong_theta_fails_span_reuse_alone(model: SpanModel):
    wrong = replace(model, rotation=replace(model.rotation, frequencies=1.01 * model.rotation.frequencies))
    by_property = verdicts(Subject(wrong, settings("properties=[prefix_reuse,span_reuse]")))
    assert by_property == {"prefix_reuse": PASSED, "span_reuse": FAILED}


@pytest.mark.parametrize("name", OF_LOGITS)
def test_logits_of_other_weights_fail(name: str, model: SpanModel):
    subject = Subject(model, settings(f"properties=[{name}]"))
    other = deepcopy(subject.reference_model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.1)
    subject.__dict__["reference_model"] = other
    assert verdicts(subject) == {name: FAILED}


def test_another_greedy_token_fails(model: SpanModel):
    subject = Subject(model, settings("properties=[greedy_generation]"))
    other = deepcopy(subject.reference_model)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, 0))
    subject.__dict__["reference_model"] = other
    (verdict,) = measure(subject).values()
    assert verdict.verdict == FAILED
    assert "0 of 2 answers equal" in verdict.what


def test_prompts_of_all_tenants_in_one_fail(model: SpanModel, monkeypatch: pytest.MonkeyPatch):
    build_request = Subject.request
    monkeypatch.setattr(Subject, "request", lambda self, *spans, salt="": build_request(self, *spans))
    assert verdicts(Subject(model, settings("properties=[tenant_isolation]"))) == {"tenant_isolation": FAILED}


def test_repairs_that_write_to_stored_pages_fail(model: SpanModel, monkeypatch: pytest.MonkeyPatch):
    def in_place(state: RequestState, index: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`copy_pages_of` without the copy: the copy's pages are the stored ones."""
        span_pages, length = state.spans[index], state.allocation.plan.cache_spans[index].to_copy
        span_pages.copy.free()
        span_pages.copy.extend(span_pages.pages.ids[: -(-length // state.page_size)].copy())
        span_pages.copied = length
        return np.empty(0, np.int64), np.empty(0, np.int64)

    subject = Subject(model, settings("properties=[copy_on_write]"))
    assert verdicts(subject) == {"copy_on_write": PASSED}
    monkeypatch.setattr(RequestState, "copy_pages_of", in_place)
    (verdict,) = measure(subject).values()
    assert (verdict.verdict, verdict.value > 0) == (FAILED, True)


def test_states_kept_before_their_rows_fail(hybrid: SpanModel, monkeypatch: pytest.MonkeyPatch):
    def kept_early(piece: StateScan, states: StatePool, layer: int, inputs: ScanInputs, after: torch.Tensor) -> None:
        """The copy is of a state that no row has run through, whatever the slot held when it was taken."""
        if piece.copy_slot is not None:
            states.recurrent(layer, piece.copy_slot).zero_()

    monkeypatch.setattr(StateScan, "on_stop", kept_early)
    subject = Subject(hybrid, settings("model=tiny-hybrid", "properties=[chunked_prefill,state_depth]"))
    assert verdicts(subject) == {"chunked_prefill": PASSED, "state_depth": FAILED}


def test_stored_maps_without_the_last_inputs_fail(hybrid: SpanModel, monkeypatch: pytest.MonkeyPatch):
    def without_inputs(step: StoreMap, states: StatePool, windows: Windows) -> None:
        windows.clear(SlotRef(step.maps.stored, step.target))

    subject = Subject(hybrid, settings("model=tiny-hybrid", "properties=[map_composition]"))
    assert verdicts(subject) == {"map_composition": PASSED}
    monkeypatch.setattr(StoreMap, "record_windows", without_inputs)
    (verdict,) = measure(subject).values()
    assert (verdict.verdict, verdict.value > verdict.limit) == (FAILED, True)


def test_maps_that_forget_less_fail(hybrid: SpanModel, monkeypatch: pytest.MonkeyPatch):
    reached = MapScan.on_stop

    def forgets_less(piece: MapScan, states: StatePool, layer: int, inputs: ScanInputs, after: torch.Tensor) -> None:
        reached(piece, states, layer, inputs, after)
        after[..., -after.shape[-2] :].mul_(1.5)  # A, of as many columns as rows

    monkeypatch.setattr(MapScan, "on_stop", forgets_less)
    subject = Subject(hybrid, settings("model=tiny-hybrid", "properties=[prefix_reuse,map_composition]"))
    assert verdicts(subject) == {"prefix_reuse": PASSED, "map_composition": FAILED}


def test_stored_maps_that_are_not_folded_in_fail(hybrid: SpanModel, monkeypatch: pytest.MonkeyPatch):
    """A later request folds stored maps in; a request that computes its own is right, so warm differs from cold."""
    apply = ApplyMap.run

    def folds_nothing(fold: ApplyMap, states: StatePool, layer: Layers) -> None:
        if fold.source.pool is fold.maps.working or states.layers == 1:  # one layer: the proof of the maps
            apply(fold, states, layer)

    monkeypatch.setattr(ApplyMap, "run", folds_nothing)
    subject = Subject(hybrid, settings("model=tiny-hybrid", "properties=[map_composition]"))
    assert verdicts(subject) == {"map_composition": FAILED}


def test_what_did_not_happen_fails():
    assert Measurement(None, 1.0, "nothing was reused").verdict == FAILED
    assert Measurement(float("nan"), 1.0, "no number").verdict == FAILED


def test_positions_that_move_with_length_are_refused(tmp_path: Path):
    tiny = compose("conformance", []).model
    config = {
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": tiny.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = settings(f"model={tmp_path}", f"engine.name={tmp_path}")
    assert run_conformance(config, "run", tmp_path)
    properties = json.loads((tmp_path / "conformance/run/summary.json").read_bytes())["properties"]
    assert list(properties) == ["supported_layers"]
    assert properties["supported_layers"]["verdict"] == REFUSED
    assert "dynamic NTK" in properties["supported_layers"]["what"]


def test_a_failure_is_the_exit_code(model: SpanModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrong = replace(model, rotation=replace(model.rotation, frequencies=1.01 * model.rotation.frequencies))
    monkeypatch.setattr("spanlab.engine.load.load_model", lambda *arguments: wrong)
    monkeypatch.setattr(cli, "_run_name", lambda *arguments: "run")
    with pytest.raises(SystemExit) as exit_info:
        cli._run_entry(settings("properties=[span_reuse]", f"output.root={tmp_path}"))
    assert exit_info.value.code == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("properties=[speed]", "properties=speed: expected"),
        ("prompts=1", "prompts=1: expected 2 or more"),
        ("engine.clock=wall", "engine.clock=wall: expected virtual"),
        ("engine.temperature=1", "engine.temperature=1.0: expected 0.0"),
        ("output.if_exists=resume", "output.if_exists=resume: expected replace or fail"),
    ],
)
def test_settings_that_nothing_reads_are_refused(override: str, message: str):
    with pytest.raises(Exception, match=message):
        settings(override)
