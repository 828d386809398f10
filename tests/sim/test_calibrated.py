"""Calibrated timing: prices times counts, to the nanosecond; profiles that come back as they went, or are refused."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.core.step import StepFeatures
from spanlab_sim.timings import TERMS, CalibratedTiming, Profile, read_profile

FREE = dict.fromkeys(TERMS, 0.0)
PROFILE = Profile(
    model="toy",
    machine="2 x Abacus",
    device="cpu",
    threads=1,
    dtype="float32",
    versions={"torch": "1"},
    date="2026-01-01",
    commit="abc",
    coefficients=FREE | {"step": 1000.0, "prefill_token": 2.5, "decode": 100.0, "decode_context": 0.25},
    hull=dict.fromkeys(StepFeatures._fields, (0, 1000)),
    left_out={"median": 0.01, "p95": 0.05, "bias": 0.0},
    shapes=3,
    steps=9,
    longest=64,
)
counts = st.integers(0, 10**6)
features = st.builds(StepFeatures, **dict.fromkeys(StepFeatures._fields, counts))
prices = st.fixed_dictionaries(dict.fromkeys(TERMS, st.one_of(st.just(0.0), st.floats(1e-6, 1e6))))


def test_a_step_costs_what_its_parts_cost():
    timing = CalibratedTiming(PROFILE)
    assert timing.step(StepFeatures()) == 1000
    assert timing.step(StepFeatures(prefill_tokens=3)) == 1008  # 1007.5, rounded
    assert timing.step(StepFeatures(num_decodes=2, decode_context=10)) == 1203  # 1202.5


@pytest.mark.parametrize("name", [name for name in TERMS if name != "step"])
def test_every_term_counts_something_of_its_own(name):
    timing = CalibratedTiming(replace(PROFILE, coefficients=FREE | {name: 1.0}))
    field = {"further_forward": "num_forwards", "chunk": "num_prefills", "decode": "num_decodes"}
    field |= {"first_token": "num_first_tokens", "loaded_state_byte": "loaded_state_bytes"}
    field |= {"captured_state_byte": "captured_state_bytes"}
    feature = field.get(name, name if name in StepFeatures._fields else f"{name}s")
    most = 1 if name == "further_forward" else 0  # the first forward is part of every step
    assert timing.step(StepFeatures(**{feature: 7})) == 7 - most
    assert timing.step(StepFeatures()) == 0


@given(what=features, k=st.integers(0, 40), coefficients=prices)
def test_a_span_equals_its_steps_to_the_nanosecond(what, k, coefficients):
    timing = CalibratedTiming(replace(PROFILE, coefficients=coefficients))
    span = timing.span(what, k)
    grown = [what._replace(decode_context=what.decode_context + i * what.num_decodes) for i in range(k)]
    assert span.dtype == np.int64
    assert span.tolist() == [timing.step(each) for each in grown]


def test_what_was_asked_beyond_the_hull_is_answered_and_counted():
    timing = CalibratedTiming(replace(PROFILE, hull=PROFILE.hull | {"num_decodes": (1, 4)}))
    assert timing.step(StepFeatures(num_decodes=4, decode_context=1000)) == 1650
    assert timing.step(StepFeatures(num_decodes=5, decode_context=1001)) == 1750  # 1750.25
    timing.step(StepFeatures(prefill_tokens=8))
    timing.span(StepFeatures(num_decodes=1, decode_context=999), 50)
    assert (timing.predicted, timing.outside) == (4, 2)
    assert timing.extrapolated == {"num_decodes": 2, "decode_context": 1}


def test_a_stored_profile_is_read_unchanged(tmp_path: Path):
    path = tmp_path / "deep" / "profile.json"
    PROFILE.write(path)
    assert read_profile(path) == PROFILE
    first = path.read_bytes()
    read_profile(path).write(path)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.pop("commit"), "commit is missing"),
        (lambda content: content.update(threads="two"), "threads=two: expected a whole number"),
        (lambda content: content.update(shapes=True), "shapes=True: expected a whole number"),
        (lambda content: content["left_out"].update(bias="low"), r"left_out\.bias=low: expected a number"),
        (lambda content: content.update(colour="red"), "colour: no such key"),
        (lambda content: content["coefficients"].pop("step"), "coefficients has step too many or too few"),
        (
            lambda content: content["coefficients"].update(chunk=-1.0),
            r"coefficients\.chunk=-1\.0: expected zero or more",
        ),
        (lambda content: content["hull"].update(num_decodes=[1]), r"hull\.num_decodes\[1\] is missing"),
        (lambda content: content["hull"].pop("num_decodes"), "hull has num_decodes too many or too few"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_sentence(tmp_path: Path, change, words):
    content = asdict(PROFILE)
    change(content)
    path = tmp_path / "profile.json"
    path.write_bytes(orjson.dumps(content))
    with pytest.raises(ValueError, match=rf"^timing\.profile={path}: {words}; expected a profile as the entry calib"):
        read_profile(path)


@pytest.mark.parametrize(("content", "words"), [("{", "expected JSON, but EOF"), ("[1]", "expected an object, not")])
def test_what_is_not_even_an_object_is_refused(tmp_path: Path, content, words):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"profile\.json: .*{words}.*; expected a profile"):
        read_profile(path)


def test_a_profile_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nothing\.json: No such file or directory; expected a profile"):
        read_profile(tmp_path / "nothing.json")


def test_a_profile_from_before_there_were_maps_measured_none(tmp_path: Path):
    content = asdict(PROFILE)
    for name, field in (("composed_map", "composed_maps"), ("map_token", "map_tokens")):
        del content["coefficients"][name], content["hull"][field]
    path = tmp_path / "profile.json"
    path.write_bytes(orjson.dumps(content))
    timing = CalibratedTiming(read_profile(path))
    assert timing.step(StepFeatures()) == timing.step(StepFeatures(composed_maps=2)) == 1000
    assert (timing.predicted, timing.outside, timing.extrapolated) == (2, 1, {"composed_maps": 1})
    del content["hull"]["scan_runs"]
    path.write_bytes(orjson.dumps(content))
    with pytest.raises(ValueError, match="scan_runs"):
        read_profile(path)
