"""Makers that the tests of reuse methods share: small models, requests, arms and runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from spanlab.build import build_policy
from spanlab.cli import compose
from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.repair import PREFIXES_ALONE, MapRules, Repair, SpanSettings
from spanlab.core.request import UNLIMITED, Budget, Request, Span
from spanlab.core.step import Backend, ScheduledStep, StepResult
from spanlab.engine.engine import Engine, spare_pages
from spanlab.engine.load import named_config, pool_pages, random_model
from spanlab.engine.maps import MapShape, SpanMaps, form_of
from spanlab.engine.model import SpanModel, spec_of
from spanlab.engine.outputs import Sampler
from spanlab.engine.pages import PagePool, PoolShape
from spanlab.engine.slots import ALL, StatePool
from spanlab.model_files import find_config
from spanlab.records import Record, RunRow
from spanlab.settings import Strategy, Study
from spanlab_sim.run import serve

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": (2 / 64) ** 0.5,  # scores of deviation 2: a wrong position shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HYBRID = SMALL | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,  # its layers normalise their outputs: larger values would amplify rounding
}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}
KERNELS = {  # where keys are rotated, and how they are stored for it
    "rotate_keys": {"keys": "raw", "kernel": "rotate_keys", "sharing": "canonical"},
    "rotate_queries": {"keys": "local", "kernel": "rotate_queries", "sharing": "canonical"},
    "pre_rotated": {"keys": "local", "kernel": "pre_rotated", "sharing": "private"},
}
HEAD, QUESTION = -1, -2


#: Keys that make `tiny` or `tiny-hybrid` a model of another family.
FAMILIES = {
    "llama": {},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_5": {},
    "qwen3_next": {"model_type": "qwen3_next", "num_experts": 0},
}


def family_config(family: str) -> PreTrainedConfig:
    """The config of `tiny`, or of `tiny-hybrid` for a hybrid, as a model of a family."""
    keys = dict(find_config("tiny-hybrid" if "qwen3_" in family else "tiny", "engine.name").keys)
    return AutoConfig.for_model(**keys | FAMILIES[family])


@cache
def make_small(architecture: str = "llama", rope: str = "default", layers: int = 3, device: str = "cpu") -> SpanModel:
    """A small model of a family in float32, the same one each time; not to be changed."""
    rotation = {"rope_type": rope, "rope_theta": 10000.0} | ROPES[rope]
    overrides = SMALL | {"rope_parameters": rotation, "num_hidden_layers": layers}
    if architecture == "mistral":
        overrides["sliding_window"] = None
    if architecture == "qwen2":
        del overrides["head_dim"]  # which it has no field for; it comes to the same
    name = f"small {architecture} {rope} {layers}"
    model = random_model(name, AutoConfig.for_model(architecture, **overrides), device=device)
    if device != "cpu":  # which draws other numbers from the same seed
        model.hf.load_state_dict(make_small(architecture, rope, layers).hf.state_dict())
    return model


@cache
def make_hybrid(architecture: str = "qwen3_5_text", device: str = "cpu", layers: int = 3) -> SpanModel:
    """A small hybrid: recurrent layers and at last one of attention, two value heads to a key head."""
    model = random_model(f"small {architecture} {layers}", _hybrid_config(architecture, layers), device=device)
    if device != "cpu":
        model.hf.load_state_dict(make_hybrid(architecture, layers=layers).hf.state_dict())
    return model


def _hybrid_config(architecture: str, layers: int, **overrides: int) -> PreTrainedConfig:
    kinds = ["linear_attention"] * (layers - 1) + ["full_attention"]
    experts = {"num_experts": 0} if architecture == "qwen3_next" else {}
    sizes = HYBRID | experts | {"num_hidden_layers": layers, "layer_types": kinds}
    return AutoConfig.for_model(architecture, **sizes | overrides)


def make_choice(name: str, **options: object) -> SpanModel:
    """A model of conf/model with random weights, in float32 unless `dtype` is set."""
    return random_model(name, named_config(name), **options)


@cache
def make_slow_hybrid(architecture: str = "qwen3_5_text") -> SpanModel:
    """A small hybrid with slow decay, as in trained models: with fast decay no state would pass a span."""
    model = random_model(f"slow {architecture}", _hybrid_config(architecture, 3, linear_key_head_dim=24))
    steps = torch.tensor([1e-4, 1e-3, 3e-3, 1e-2])  # per value head; Mamba-2 draws them from [1e-3, 1e-1]
    for name, weight in model.hf.named_parameters():
        if name.endswith("A_log"):
            weight.zero_()
        elif name.endswith("dt_bias"):
            weight.copy_(steps.expm1().log())  # softplus of it is the step
    return model


# -- requests ---------------------------------------------------------------------------------------------------------


@cache
def random_tokens(name: int, length: int, vocab: int = 256) -> np.ndarray:
    """The same random tokens for the same name and length."""
    return np.random.default_rng([abs(name), name < 0, length]).integers(3, vocab, length).astype(np.int32)


def text(name: int, length: int, vocab: int = 256) -> Span:
    """Ordered text."""
    return Span(random_tokens(name, length, vocab))


def document(name: int, length: int, vocab: int = 256) -> Span:
    """An independent span."""
    return Span(random_tokens(name, length, vocab), independent=True)


def make_request(id: int, *spans: Span, output: int = 1, at: int = 0, cache_salt: str = "") -> Request:
    """A request of spans."""
    return Request(id, 0, spans, output_len=output, arrived_at=at, cache_salt=cache_salt)


def beginnings(lengths: Sequence[int]) -> list[Request]:
    """Prompts of one document each, of which all are beginnings of the longest."""
    longest = random_tokens(0, max(lengths))
    return [
        make_request(
            index,
            text(HEAD, 9),
            Span(longest[:length], independent=True),
            text(-index - 9, 7),
            output=2,
            at=index * APART,
        )
        for index, length in enumerate(lengths)
    ]


def questions(
    orders: Iterable[Sequence[int]], lengths: Sequence[int], *, head: int = 11, tail: int = 7, output: int = 1, at=None
) -> list[Request]:
    """A request for every order of documents, each with the same head and another question, `at` apart."""
    return [
        make_request(
            rank,
            *([text(HEAD, head)] if head else []),
            *(document(name, lengths[name]) for name in order),
            text(QUESTION - rank, tail),
            output=output,
            at=rank * APART if at is None else rank * at,
        )
        for rank, order in enumerate(orders)
    ]


APART = 10**12  # nanoseconds: longer than any request lasts, so that it is alone


def parted(output: int = 1) -> list[Request]:
    """Prompts that meet, with text between their documents and one document twice."""
    return [
        make_request(0, text(HEAD, 9), document(0, 20), text(5, 6), document(1, 33), text(6, 8), output=output),
        make_request(1, text(HEAD, 9), document(1, 33), document(0, 20), document(1, 33), text(7, 3), output=output),
        make_request(2, document(2, 18), text(5, 6), document(0, 20), text(8, 4), output=output),
    ]


def permutations(count: int) -> list[tuple[int, ...]]:
    """Every order of so many documents."""
    return list(itertools.permutations(range(count)))


# -- arms and runs ----------------------------------------------------------------------------------------------------


@cache
def _study() -> Study:
    overrides = ["model=llama-3.1-8b", "arms=methods", "load.arms=[]", "load.rates_rps=[]"]
    return compose("smoke", overrides)


def study_of(model: SpanModel) -> Study:
    """All methods for a model."""
    study = copy(_study())
    study.model = spec_of(model.name, model.config, model.dtype)
    return study


def arm(name: str, block_size: int | None = None, repair: dict[str, object] | None = None, **spans: object) -> Strategy:
    """An arm of conf/arms/methods.yaml with another page, repair and span settings."""
    strategy = deepcopy(_study().arms[name])
    if block_size is not None:
        strategy.block_size = block_size
        strategy.match = "radix" if block_size == 1 else strategy.match
    if repair is not None:
        strategy.spans = replace(strategy.spans, repair=type(strategy.spans.repair)(**repair))
    if spans:
        strategy.spans = replace(strategy.spans, **spans)
    strategy.check(f"arms.{name}")
    return strategy


@cache
def _hybrid_study() -> Study:
    return compose("quality_sim", ["model=tiny-hybrid"])


def checkpoint(name: str, block_size: int = 16) -> Strategy:
    """An arm of conf/arms/checkpoints.yaml with pages that suit a pool."""
    strategy = deepcopy(_hybrid_study().arms[name])
    strategy.block_size = block_size
    strategy.check(f"arms.{name}")
    return strategy


def hybrid_pic(
    form: str = "exact",
    block_size: int = 1,
    *,
    rank: int | None = None,
    dtype: str = "float32",
    kernel: str = "rotate_queries",
    placement: str = "kv_only",
    repaired: int = 0,
    interval: int | None = None,
) -> Strategy:
    """Position-independent caching of a hybrid: spans have maps, and ordered text the checkpoints of a placement."""
    strategy = checkpoint(placement, block_size)
    strategy.match = "radix" if block_size == 1 else strategy.match
    keys = "raw" if kernel == "rotate_keys" else "local"
    repair = Repair("first", repaired) if repaired else Repair()
    strategy.spans = SpanSettings(keys=keys, kernel=kernel, repair=repair, maps=MapRules(form, rank, dtype, interval))
    strategy.check("arms.hybrid_pic")
    return strategy


def make_policy(
    model: SpanModel, strategy: Strategy, budget: int | None = None, states: int | None = None
) -> TreePolicy:
    """A policy whose store holds `budget` tokens and `states` recurrent states."""
    policy = build_policy(study_of(model), strategy, 0, model.context)
    kv = UNLIMITED if budget is None else budget * policy.store.token_bytes
    state = UNLIMITED if states is None else states * max(policy.store.state_bytes, policy.rules.map_bytes)
    policy.store.budget = Budget(kv_bytes=kv, state_bytes=state)
    return policy


def least_budget(model: SpanModel, strategy: Strategy, requests: Iterable[Request]) -> int:
    """Tokens of a store in which any one of the requests can just be served."""
    policy = make_policy(model, strategy)
    return max(policy.need(request).tokens for request in requests)


@dataclass
class Paced:
    """A backend with fixed step durations, in nanoseconds."""

    backend: Backend
    duration: Callable[[ScheduledStep], int]

    def resume(self) -> None:
        self.backend.resume()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        duration = self.duration(step)
        return replace(self.backend.execute(step, deadline_ns), duration_ns=duration)

    def completed(self, step: ScheduledStep) -> None:
        self.backend.completed(step)

    def close(self) -> None:
        self.backend.close()


@dataclass
class Run:
    """Results of a run on the engine."""

    engine: Engine
    rules: BatchRules
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    rows: list[RunRow] = field(default_factory=list)

    def serve(self, requests: Sequence[Request]) -> Run:
        """Serve further requests with the stored blocks, in steps of a millisecond."""
        paced = Paced(self.engine, lambda step: 10**6)
        self.rows.append(serve(requests, self.engine.policy, self.rules, paced, self._record))
        self.engine.policy.check()
        return self

    def note(self, sequence, row: Tensor) -> None:
        """Record the logits of a token."""
        logits = self.logits.setdefault(sequence.request.id, [])
        logits[sequence.generated :] = [row.cpu()]

    def _record(self, record: Record) -> None:
        self.records[record.request_id] = record

    def reused(self, requests: Sequence[Request]) -> list[int]:
        """Reused tokens of each request."""
        return [self.records[request.id].reused_tokens for request in requests]

    @property
    def stored(self) -> list[int]:
        """Pages of stored nodes."""
        return self.engine.nodes.all()

    def of(self, request: Request) -> Tensor:
        """Logits of all output tokens of a request, [output, V]."""
        return torch.stack(self.logits[request.id])


def make_states(model: SpanModel) -> StatePool | None:
    """A poisoned pool for the states of a hybrid."""
    return StatePool(model.state_shape, model.dtype, model.device, poison=True) if model.state_shape else None


def make_maps(model: SpanModel, policy: TreePolicy) -> SpanMaps | None:
    """Poisoned pools for the maps of spans, where the policy has any."""
    if policy.rules.maps is None:
        return None
    shape = MapShape(model.state_shape, form_of(policy.rules.maps), model.dtype, policy.rules.repair.tokens)
    return SpanMaps(shape, model.device, poison=True)


def start(
    model: SpanModel,
    strategy: Strategy,
    requests: Sequence[Request],
    *,
    rules: BatchRules | None = None,
    budget: int | None = None,
    states: int | None = None,
    sampler: Sampler | None = None,
    at_once: bool = False,
    decode: str = "plain",
    prefill: str = "plain",
) -> Run:
    """An engine with poisoned pools just large enough for `requests` in any order, and nothing served yet."""
    rules = rules or BatchRules(max_num_batched_tokens=4096, max_num_seqs=4)
    policy = make_policy(model, strategy, budget, states)
    pages = pool_pages(policy, rules, requests, model.context) + spare_pages(decode)
    shape = PoolShape(model.layers, pages, strategy.block_size, model.kv_heads, model.head_dim)
    pool = PagePool(shape, model.dtype, model.device, poison=True)
    positions = max(request.num_tokens + request.longest_output for request in requests)
    key_layout, notes = strategy.spans or PREFIXES_ALONE, []
    engine = Engine(
        model,
        pool,
        policy,
        key_layout,
        positions=positions,
        sampler=sampler,
        on_logits=lambda sequence, row: notes[0](sequence, row),
        states=make_states(model),
        maps=make_maps(model, policy),
        at_once=at_once,
        decode=decode,
        prefill=prefill,
    )
    run = Run(engine, rules)
    notes.append(run.note)
    _guard(engine)
    return run


def _guard(engine: Engine) -> None:
    """Check in every step that stored pages, states and maps are not written."""
    compute = engine.run

    def guarded(step, times=1):
        stored, states = engine.nodes.all(), engine.memory.states.all() if engine.memory else []
        before = engine.pool.checksum(stored) if stored else ""
        before_states = [state_of(engine, slot) for slot in states]
        maps = {slot: map_of(engine, slot) for slot in stored_maps(engine)}
        phases = compute(step, times)
        assert not stored or engine.pool.checksum(stored) == before, "a stored page was written"
        assert all(state_of(engine, slot).equal(was) for slot, was in zip(states, before_states, strict=True)), (
            "a stored state"
        )
        assert all(map_of(engine, slot).equal(was) for slot, was in maps.items()), "a stored map was written"
        return phases

    engine.run = guarded


def state_of(engine: Engine, slot: int) -> Tensor:
    """All numbers of a state, as one row."""
    pool = engine.memory.states.pool
    parts = [read(layer, slot) for layer in range(pool.shape.layers) for read in (pool.recurrent, pool.conv)]
    return torch.cat([tensor.flatten() for tensor in parts])


def stored_maps(engine: Engine) -> list[int]:
    """Slots of the stored maps."""
    return engine.memory.maps.all() if engine.memory and engine.memory.maps else []


def map_of(engine: Engine, slot: int) -> Tensor:
    """All numbers of a stored map, as one row."""
    stored = engine.memory.maps.maps.stored
    return torch.cat([stored.tensor(name, ALL, slot).flatten().float() for name in stored.specs])


def run(model: SpanModel, strategy: Strategy, requests: Sequence[Request], **options) -> Run:
    """Serve requests from an empty cache."""
    return start(model, strategy, requests, **options).serve(requests)


@contextmanager
def rows_of_layers(model: SpanModel) -> Iterator[list[int]]:
    """Rows through the MLP of each layer, forward by forward."""
    rows: list[int] = []
    handles = [
        layer.mlp.register_forward_hook(lambda module, given, out: rows.append(out.shape[1]))
        for layer in model.hf.base_model.layers
    ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def nothing_leaks(run: Run) -> bool:
    """Whether every page and every state is either free or registered in the store."""
    pool, stored = run.engine.pool, run.stored
    tokens = run.engine.policy.store.tree.num_tokens
    exact = len(stored) == len(set(stored)) == tokens // pool.shape.page_size
    memory, store = run.engine.memory, run.engine.policy.store
    if memory is not None:
        used, stored_states = memory.states.pool.used, len(memory.states.all())
        exact = exact and used == stored_states == (store.state_cached - map_bytes(run.engine)) // store.state_bytes
    return exact and pool.free_pages + len(stored) == pool.shape.pages


def map_bytes(engine: Engine) -> int:
    """Bytes of the stored maps; no other map may be allocated."""
    maps = engine.memory.maps
    if maps is None:
        return 0
    assert maps.maps.working.used == 0, "a working map was not freed"
    assert maps.maps.stored.used == len(maps.all()), "a map is neither stored nor free"
    return len(maps.all()) * maps.maps.stored.slot_bytes
