"""Every arm of the engine's studies beside a CUDA device that is not there: nothing mixes devices, and nothing waits.

What may wait for the device is listed here, with its reason; everything else that does fails.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorDeviceMismatchError

from spanlab.build import build_engine
from spanlab.core.admission import BatchRules
from spanlab.core.request import Request
from spanlab.engine.engine import Engine
from spanlab.engine.model import SpanModel
from spanlab.engine.outputs import Recording, Sampler
from spanlab.engine.settings import EngineSettings
from spanlab.settings import Strategy
from spanlab.study.jobs import warm_requests
from spanlab_sim.run import serve

from .factories import (
    APART,
    Paced,
    arm,
    checkpoint,
    hybrid_pic,
    make_hybrid,
    make_policy,
    make_request,
    make_small,
    questions,
    text,
)
from .fake_device import DEVICE, FakeDevice, fake_device, on_device

# Allowed waits of a step: the scheduler needs the tokens, once per step.
TOKENS = "engine.outputs:read copies to the host"
# A step that chooses no token lasts until the device is done, or its time would be the next one's.
END = "engine.engine:seconds waits for an event"
# Which pages a query-aware repair copies depends on the tokens that its probe chooses, once a repair.
PROBE = "engine.repair:chosen copies to the host"
# torch checks the result of a decomposition if a map is stored in low rank.
SVD = "engine.maps:low_rank checks what linalg_svd gives"
METHODS = (
    "none", "radix", "pic", "pic_raw", "lego_link_16", "cache_blend_15", "ape", "as_seen_blend_15", "query_aware_16",
    "neighbour_aware_16",
)  # fmt: skip
OTHERS = (  # with other settings of the runs above
    "block_hash_16", "cache_blend_kv2_15", "as_seen", "old_positions", "random_16", "last_16", "strided_15",
    "pic_turned", "cache_blend_lmcache_15", "cache_blend_gradual_15",
)  # fmt: skip
LENGTHS = (20, 5, 33)


@dataclass(frozen=True)
class Step:
    """Work of one engine step: chunks and decodes, waits, copies to the device, and kernels."""

    chunks: int
    decodes: int
    waits: Counter[str]
    copies: int
    kernels: Counter[str]


def run(model: SpanModel, strategy: Strategy, requests: Sequence[Request], **options: object) -> list[Step]:
    """The steps in which a fake device serves requests."""
    with fake_device() as device:
        engine = make_engine(on_device(model), strategy, requests, **options)
        return serve_on(device, engine, requests)


def make_engine(
    model: SpanModel,
    strategy: Strategy,
    requests: Sequence[Request],
    temperature: float = 0.0,
    decode: str = "plain",
    **more: object,
) -> Engine:
    """As the study builds it."""
    parts = SimpleNamespace(batch=RULES, engine=EngineSettings(temperature=temperature, decode=decode))
    return build_engine(parts, strategy, model, make_policy(model, strategy), requests, **more)


RULES = BatchRules(max_num_batched_tokens=64, max_num_seqs=3)


def serve_on(device: FakeDevice, engine: Engine, requests: Sequence[Request]) -> list[Step]:
    """Serve requests, and say what each step did."""
    steps: list[Step] = []
    compute = engine.run

    def counted(step, times=1):
        device.forget()
        phases = compute(step, times)
        waits, kernels = Counter(map(str, device.waits)), Counter(device.kernels)
        steps.append(Step(len(step.chunks), len(step.decodes), waits, device.copies, kernels))
        return phases

    engine.run = counted
    serve(requests, engine.policy, RULES, Paced(engine, lambda step: 10**6), lambda record: None)
    return steps


def slow(names: Sequence[str]) -> list[object]:
    """Cases that are left to -m slow."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def cold_and_warm() -> list[Request]:
    """A prompt, and when it is done two at once of the same documents, one more, and another order."""
    cold = questions([(0, 1)], LENGTHS, output=2)
    warm = questions([(1, 0), (2, 1, 0)], LENGTHS, output=2, at=0)
    return [*cold, *(replace(one, id=one.id + 1, arrived_at=APART) for one in warm)]


def forks() -> list[Request]:
    """Prompts of a hybrid that share a text of several grid steps."""
    arrived = (0, APART, APART)
    return [make_request(id, text(1, 150), text(-100 - id, 9), output=2, at=at) for id, at in enumerate(arrived)]


def one_of_each() -> SpanModel:
    """A hybrid of one recurrent layer and one of attention; `make_slow_hybrid` has three, which takes three times."""
    return make_hybrid(layers=2)


def check(steps: Sequence[Step], *needed: str, copies: int = 1) -> None:
    """Every step waits once at its end, and before only for what its arm is known to need; decoding copies once."""
    assert any(step.chunks for step in steps) and any(step.decodes for step in steps), "both kinds of steps ran"
    for step in steps:
        assert step.waits[TOKENS] + step.waits[END] == 1, f"a step waits once at its end: {step}"
        other_waits = set(step.waits) - {TOKENS, END, *needed}
        assert not other_waits, f"a step waits for {sorted(other_waits)}"
        assert not step.decodes or step.waits[TOKENS] == 1, "a step that decodes reads its tokens"
        assert step.chunks or step.copies == copies, f"a step that decodes copies {copies} times: {step}"
        assert step.waits[PROBE] <= step.chunks and step.kernels["attend_tiles"], step


@pytest.mark.parametrize("name", [*METHODS, *slow(OTHERS)])
def test_a_method_waits_for_its_tokens_alone(name):
    # deviations need a layer to differ in, and rows leave twice
    model = make_small(layers=4 if "gradual" in name else 3 if "blend" in name else 2)
    check(run(model, arm(name), cold_and_warm()), *[PROBE] * (name == "query_aware_16"))


@pytest.mark.parametrize("name", ["none", "block_64", *slow(["dp_3", "branch", "kv_only"])])
def test_states_of_a_hybrid_wait_for_tokens_alone(name):
    check(run(one_of_each(), checkpoint(name), forks()))


@pytest.mark.parametrize("form", ["exact", "low_rank", *slow(["scalar", "sum", "last"])])
def test_maps_of_a_hybrid_wait_for_tokens_alone(form):
    strategy = hybrid_pic(form, rank=4 if form == "low_rank" else None)
    check(run(one_of_each(), strategy, cold_and_warm()), *[SVD] * (form == "low_rank"))


def test_tokens_are_drawn_on_the_device():
    check(run(make_small(layers=2), arm("pic"), cold_and_warm(), temperature=1.0), copies=2)  # the draws travel apart


def test_recorded_logits_come_to_the_host_after_the_tokens():
    recording = Recording("logits")
    steps = run(make_small(layers=2), arm("pic"), cold_and_warm(), on_logits=recording.note)
    assert len(recording._logits) == 3 * 2
    check(steps, "engine.outputs:note copies to the host")


def test_every_kernel_of_the_engine_takes_part():
    steps = run(make_small(layers=2), arm("pic_turned"), cold_and_warm())
    assert {"attend_tiles", "_move", "_rotate"} <= set().union(*(step.kernels for step in steps))


@pytest.mark.parametrize("name", ["pic", *slow(["radix", "pic_raw"])])
def test_the_warm_up_launches_every_variant_that_a_study_does(name):
    """Else the first step that needs one would be timed with its compilation."""
    orders = [(0, 1, 2), (2, 0, 1), (1, 2), (0,), (2, 1, 0), (1, 0)]
    requests, launched = questions(orders, (150, 40, 90), output=2, at=0), []
    for asked in (warm_requests(requests), requests):
        with fake_device() as device:
            serve_on(device, make_engine(on_device(make_small(layers=2)), arm(name), asked), asked)
            launched.append(device.variants)
    assert launched[1] <= launched[0]


# -- the tests can fail -----------------------------------------------------------------------------------------------


def test_a_hidden_wait_in_a_forward_is_found(monkeypatch):
    choose = Sampler.choose

    def looking(sampler, logits, draws):
        assert logits.max().item() == 0
        return choose(sampler, logits, draws)

    monkeypatch.setattr(Sampler, "choose", looking)
    with pytest.raises(AssertionError, match=r"a step waits for .*outputs:choose reads a number"):
        check(run(make_small(layers=2), arm("pic"), cold_and_warm()))


WAITS: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "item": ("reads a number", lambda x: x.sum().item()),
    "truth": ("reads a number", lambda x: bool(x.any())),
    "list": ("reads a number", lambda x: x[0, :1].tolist()),
    "host": ("copies to the host", lambda x: x.cpu()),
    "into host memory": ("copies to the host", lambda x: torch.zeros(4, 4).copy_(x)),
    "mask": ("counts what a mask chooses", lambda x: x[x > 0]),
    "nonzero": ("counts what nonzero gives", lambda x: x.nonzero()),
    "repeats": ("counts what repeat_interleave gives", lambda x: x[0].repeat_interleave(x[0].long())),
    "literal": ("copies from memory that is not pinned", lambda x: torch.tensor([1, 2], device=x.device)),
    "pageable": ("copies from memory that is not pinned", lambda x: torch.arange(3).to(x.device, non_blocking=True)),
    "blocking": ("copies from memory that is not pinned", lambda x: torch.zeros(3, pin_memory=True).to(x.device)),
    "host indices": ("copies indices from memory that is not pinned", lambda x: x[torch.tensor([1, 2])]),
    "decomposition": ("checks what linalg_svd gives", lambda x: torch.linalg.svd(x)),
    "everything": ("waits for everything", lambda x: torch.cuda.synchronize()),
}


@pytest.mark.parametrize("kind", WAITS)
def test_each_kind_of_wait_is_noted(kind):
    why, work = WAITS[kind]
    with fake_device() as device:
        x = torch.ones(4, 4, device=DEVICE)
        device.forget()
        with suppress(DynamicOutputShapeException):  # fake tensors have no numbers to count
            work(x)
        assert [wait.why for wait in device.waits] == [why]


def test_work_on_the_device_waits_for_nothing():
    with fake_device() as device:
        x = torch.ones(4, 4, device=DEVICE)
        at = torch.zeros(2, dtype=torch.int64, pin_memory=True).to(DEVICE, non_blocking=True)
        x[at] = 2.0
        assert (torch.where(x > 0, x, 1.0)[at] + torch.arange(4, device=DEVICE)).shape == (2, 4)
        assert device.waits == [] and device.copies == 1


def test_operands_on_two_devices_are_refused():
    with fake_device(), pytest.raises(FakeTensorDeviceMismatchError):
        torch.ones(4, device=DEVICE) + torch.ones(4)
