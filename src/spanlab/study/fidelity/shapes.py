"""Calibration as a study: designed shapes with the arms, the scheduler and the engine of another study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spanlab.core.passages import PassageRules
from spanlab.core.request import Request
from spanlab.settings import ArrivalSettings, LoadSweep, StoreSettings, Study, TimingSettings, WorkloadSettings
from spanlab.settings.analyses import DESIGNED
from spanlab.workloads.designed_shapes import Shape, design
from spanlab.workloads.workload import Provenance, Workload


def calibration_of(study: Study, requests: Sequence[Request]) -> Study:
    """Return the calibration of a study: prompts and outputs up to its longest, with an unlimited store."""
    limits = {
        "longest": study.design.longest or max(request.num_tokens for request in requests),
        "outputs": study.design.outputs or max(request.output_len for request in requests),
    }
    return replace(
        study,
        workload=WorkloadSettings(kind=DESIGNED, source="modelled"),
        arrivals=ArrivalSettings(kind="as_given"),
        arms={name: replace(arm, passages=PassageRules()) for name, arm in study.arms.items()},
        timing=TimingSettings(),
        store=StoreSettings(),
        seeds=[0],
        warmup_fraction=0.0,
        load=LoadSweep(),
        sweep=[],
        repeats=1,
        analyses=None,
        engine=replace(study.engine, clock="virtual", record="nothing", teacher=None),
        design=replace(study.design, **limits),
    )


def shapes_of(study: Study) -> list[Shape]:
    """Shapes of a calibration, by number."""
    arms = {name: study.arms[name].spans is not None for name in study.chosen()}
    return design(study.design, arms, study.batch, study.model.vocab_size)


def shape_numbers(study: Study, arm: str) -> range:
    """Numbers of the shapes that an arm runs."""
    arms = study.chosen()
    return range(arms.index(arm), study.design.shapes, len(arms))


def designed_workload(study: Study) -> Workload:
    """Workload with the requests of all shapes."""
    requests = [request for shape in shapes_of(study) for request in shape.requests]
    longest = max(request.num_tokens for request in requests)
    detail = f"{study.design.shapes} designed shapes of {len(requests):,} requests, prompts of up to {longest:,} tokens"
    numbered = (replace(request, id=index) for index, request in enumerate(requests))
    return Workload("designed shapes", tuple(numbered), Provenance("modelled", detail))
