"""One dataclass per kind: composition, values of other kinds, earlier forms, and mistakes of plugins."""

import pickle
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest

from spanlab.cli import compose
from spanlab.kinds import Kind, Kinds, field
from spanlab.registry import forget, positive
from spanlab.settings.composition import open_schema
from spanlab.settings.study import Study
from spanlab_sim.arrivals import ARRIVALS, ClosedLoop, Gamma, Poisson
from spanlab_sim.routing import AtRandom, Replicas, Weighted
from spanlab_sim.timings import TIMINGS, Calibrated, Constant, Fitted, Roofline

NO_LOADS = ("load.rates_rps=[]", "load.arms=[]")
CONSTANT = Constant(seconds_per_computed_token=0.0001, seconds_per_decode_token=0.0, seconds_per_step=0.0)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), Poisson(rate_rps=8.0, order="shuffled")),
        (("arrivals=gamma",), Gamma(rate_rps=8.0, burstiness=0.25, order="shuffled")),
        (("arrivals.kind=gamma", "arrivals.burstiness=2"), Gamma(rate_rps=8.0, burstiness=2.0, order="shuffled")),
        (("arrivals=closed_loop", "arrivals.rate_rps=null", *NO_LOADS), ClosedLoop(clients=1)),
        (
            ("arrivals.kind=closed_loop", "+arrivals={rate_rps:null,clients:3}", *NO_LOADS),
            ClosedLoop(clients=3, order="shuffled"),
        ),
    ],
)
def test_the_kind_is_the_schema_of_its_section(overrides: tuple[str, ...], expected: object):
    assert compose("smoke", list(overrides)).arrivals == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), Roofline()),
        (("timing=constant",), CONSTANT),
        (("timing=constant", "timing.seconds_per_step=null"), replace(CONSTANT, seconds_per_step=None)),
        (("timing.kind=constant", "timing.seconds_per_computed_token=1"), Constant(seconds_per_computed_token=1.0)),
        (("timing=fitted", "timing.profile=p.json"), Fitted(profile="p.json")),
    ],
)
def test_a_timing_model_is_the_schema_of_its_section(overrides: tuple[str, ...], expected: object):
    assert compose("smoke", list(overrides)).timing == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), Replicas()),
        (("replicas.count=2", "replicas.routing=random"), AtRandom(count=2)),
        (("replicas.routing=weighted", "replicas.cache_weight=2"), Weighted(cache_weight=2.0)),
        (("replicas.routing=weighted", "replicas.load_weight=null"), Weighted()),
        (("+replicas={events_lost:null}",), Replicas()),
    ],
)
def test_a_section_names_its_choosing_key(overrides: tuple[str, ...], expected: object):
    assert compose("smoke", list(overrides)).replicas == expected


def test_settings_have_no_keys_of_other_kinds():
    study: Any = compose("smoke", [])
    assert asdict(study)["arrivals"] == {"kind": "poisson", "rate_rps": 8.0, "order": "shuffled"}
    assert asdict(study)["timing"] == {"kind": "roofline"}
    assert asdict(study)["replicas"] == {"count": 1, "routing": None}


def test_sections_of_earlier_run_folders_are_read():
    earlier = {"kind": "poisson", "rate_rps": 2, "order": None, "clients": None, "options": {}}
    assert ARRIVALS.of("arrivals", earlier) == Poisson(rate_rps=2.0)
    earlier = {"kind": "calibrated", "seconds_per_step": None, "profile": None, "options": {}}
    assert TIMINGS.of("timing", earlier) == Calibrated()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("arrivals.clients=3", "arrivals.clients=3 with arrivals.kind=poisson: expected arrivals.clients=null"),
        ("arrivals.rat_rps=3", "arrivals.rat_rps: no such key; expected one of kind, rate_rps, order (did you mean"),
        ("arrivals.rate_rps=[1]", r"arrivals.rate_rps=[1]: expected a number"),
        ("arrivals.kind=null", "arrivals.kind=None: expected one of"),
        ("arrivals.kind=gamma", "arrivals.kind=gamma needs arrivals.burstiness: expected a number"),
        ("replicas.cout=2", "replicas.cout: no such key; expected one of count, routing (did you mean count?)"),
        ("replicas.count=two", "replicas.count=two: expected a whole number"),
        ("replicas.routing=near", "replicas.routing=near: expected one of prefix_events, round_robin, "),
        ("timing=fitted", "timing.kind=fitted needs timing.profile: expected text"),
        ("timing.kind=constant", "timing.kind=constant needs timing.seconds_per_computed_token: expected a number"),
        (
            "timing={kind:constant,seconds_per_computed_token:0}",
            "timing.seconds_per_computed_token=0 with timing.seconds_per_step=null: expected a time above zero",
        ),
        (
            "timing.profile=x.json",
            "timing.profile=x.json with timing.kind=roofline: expected timing.profile=null, for it goes with calib",
        ),
    ],
)
def test_a_key_that_does_not_fit_the_kind_is_refused(given: str, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        compose("smoke", [given])


@dataclass
class Shape(Kind):
    """A choice of this test."""


SHAPES: Kinds[Shape] = Kinds("shape", Shape)


def _function() -> None: ...


@dataclass
class _Below(Shape):
    side: float = field(1.0, positive, "length of a side")


class _Bare(Shape):
    side: float = field(1.0, positive, "length of a side")


@pytest.mark.parametrize(
    ("registered", "expected"),
    [
        (_function, "_function: shape=new: expected a subclass of Shape (docs/extending.md)"),
        (_Below, "_Below: shape=new: expected @dataclass above @register"),
        (_Bare, "_Bare: shape=new: expected @dataclass above @register"),
    ],
)
def test_a_kind_that_declares_no_keys_is_refused(registered: Callable[..., Any], expected: str):
    def used() -> None:
        SHAPES.register("new")(registered)
        SHAPES.of("shape", {"kind": "new"})

    with pytest.raises(ValueError, match=f"{re.escape(expected)}$"):
        used()
    forget(__file__)


def test_a_composed_class_is_pickled_by_its_schema():
    opened = open_schema(Study)
    assert pickle.loads(pickle.dumps(opened)) is opened
