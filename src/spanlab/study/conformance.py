"""Conformance of a model on our engine, or of a running server: one verdict per property of
reuse."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spanlab.build import EngineParts, build_engine, build_policy
from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.repair import MapRules, Repair, SpanSettings
from spanlab.core.request import Request, Span
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import ScheduledSequence as Admitted
from spanlab.engine.settings import EngineSettings, dtype_of
from spanlab.model_spec import GIB, ModelSpec
from spanlab.provenance import PACKAGES_OF, run_facts
from spanlab.registry import REQUIRED, Registry, entry, one_of, positive
from spanlab.settings.arms import PlacementSettings, Strategy
from spanlab.settings.composition import composed
from spanlab.settings.server import (
    NO_ENGINE,
    OutputSettings,
    ServerSettings,
    StoreSettings,
    check_address,
)
from spanlab.settings.study import Study
from spanlab.study.conformance_live import LIVE, check_server
from spanlab.study.folder import RunFolder, entry_folder, publish, write_results
from spanlab.study.live_server import LiveSettings, LiveTest, ServerGoneError
from spanlab.study.servers.base import SERVERS, Launch, free_port, running
from spanlab.study.verdicts import (
    FAILED,
    REFUSED,
    UNTESTED,
    Measurement,
    Measurements,
    not_applicable,
    verdict_rows,
    verdict_table,
)

if TYPE_CHECKING:  # the settings are read where torch is not installed
    from torch import Tensor
    from transformers import PreTrainedModel

    from spanlab.engine.engine import Engine
    from spanlab.engine.model import SpanModel

# ------------------------------------------------------------------------------
# Settings: the model, its properties and the test prompts.
# ------------------------------------------------------------------------------

#: Functions of a served model that return a measurement.
PROPERTIES: Registry[Measurement] = Registry("properties", given=("subject",))

_ORDER = (
    *(
        "greedy_generation",
        "prefix_reuse",
        "chunked_prefill",
        "preemption",
        "tenant_isolation",
        "copy_on_write",
    ),
    *("span_reuse", "state_depth", "map_composition"),
)
_UNREAD = {"clock": "virtual", "record": "nothing", "teacher": None, "temperature": 0.0}


@dataclass
class Conformance:
    """Check on a few prompts that reuse does not change a model's output: one verdict per property.

    `model`            the model's sizes; of a server, the vocabulary of the prompts
    `engine`           the model; its clock, record, teacher and temperature are not set
    `properties`       properties to check; empty: all
    `prompts`          prompts of each property; of a server, the block boundaries to test
    `output_tokens`    tokens that each prompt generates
    `documents`        documents of a prompt
    `document_tokens`  most tokens of a document
    `server`           a running server to test instead of the engine
    `live`             how a running server is tested
    `output`           where the run is written
    """

    model: ModelSpec = REQUIRED
    engine: EngineSettings = field(default_factory=EngineSettings)
    properties: list[str] = field(default_factory=list)
    prompts: int = 4
    output_tokens: int = 16
    documents: int = 3
    document_tokens: int = 48
    server: ServerSettings = field(default_factory=ServerSettings)
    live: LiveSettings = field(default_factory=LiveSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        for key in ("documents", "output_tokens"):
            positive(key, getattr(self, key))
        if self.prompts < 2:
            raise ValueError(
                f"prompts={self.prompts}: expected 2 or more, for later prompts reuse earlier ones"
            )
        if self.document_tokens < 2:
            raise ValueError(f"document_tokens={self.document_tokens}: expected 2 or more")
        for name in self.properties:
            one_of("properties", name, LIVE if self.is_live else PROPERTIES)
        for key, only in _UNREAD.items():
            if (value := getattr(self.engine, key)) != only:
                expected = "null" if only is None else only
                raise ValueError(
                    f"engine.{key}={value}: expected {expected}, for this entry chooses its own"
                )
        self.output.refuse_resuming()
        dtype_of(self.model)
        if not self.is_live:
            for key, value, usual in (
                ("live", self.live, LiveSettings()),
                ("server", self.server, ServerSettings()),
            ):
                if value != usual:
                    raise ValueError(
                        f"{key} is set without base_url: expected the address of a server, or no such key"
                    )
            return
        if self.server.engine == NO_ENGINE:
            check_address("base_url", str(self.server.base_url))
        else:
            one_of("server.engine", self.server.engine, SERVERS)
        if self.server.prompts != "tokens":
            raise ValueError(
                f"server.prompts={self.server.prompts} with -cn conformance: expected tokens"
            )
        self.live.check(self.server, self.output_tokens)

    @property
    def is_live(self) -> bool:
        """Whether a server is tested: one that runs, or one to start."""
        return self.server.base_url is not None or self.server.engine != NO_ENGINE

    @property
    def subject(self) -> str:
        """Name of what is tested."""
        if self.server.engine != NO_ENGINE:
            return f"{self.server.engine}, {self.model.name}"
        return str(self.server.base_url) if self.is_live else self.model.name

    @property
    def chosen(self) -> list[str]:
        """Names of the properties to check: from whole prompts to spans and states, then those of
        plugins."""
        ordered = dict.fromkeys(LIVE if self.is_live else (*_ORDER, *PROPERTIES))
        return [name for name in ordered if not self.properties or name in self.properties]


# ------------------------------------------------------------------------------
# A model under test: prompts, serving with any strategy, and the dense forward of transformers
# as reference.
# ------------------------------------------------------------------------------

ONE_BY_ONE = BatchRules(max_num_batched_tokens=8192, max_num_seqs=1)
TOGETHER = BatchRules(max_num_batched_tokens=8192, max_num_seqs=64)


@dataclass
class Served:
    """An engine with its outputs: logits by request and token, and the sequences of all
    requests."""

    engine: Engine
    policy: TreePolicy
    rules: BatchRules
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    sequences: dict[int, Admitted] = field(default_factory=dict)

    def serve(self, requests: Sequence[Request]) -> None:
        """Serve requests that arrive together; entries of earlier calls stay in the store."""
        scheduler = Scheduler(self.policy, self.rules)
        for request in requests:
            scheduler.add(request)
        self.sequences |= {sequence.request.id: sequence for sequence in scheduler.waiting}
        while not scheduler.idle:
            step = scheduler.schedule(0)
            assert step is not None, "requests wait, and each of them fits in the store"
            result = self.engine.execute(step, None)
            scheduler.complete(step, 0, result.finished)
            self.engine.completed(step)
        self.engine.close()

    def note(self, sequence: Admitted, row: Tensor) -> None:
        """Store the logits of a token; after a preemption, logits of the new pass replace the old
        ones."""
        self.logits.setdefault(sequence.request.id, [])[sequence.generated :] = [row.cpu()]

    def logits_of(self, request: Request) -> Tensor:
        """Logits of all output tokens, shape [output, V]."""
        import torch

        return torch.stack(self.logits[request.id])

    def output(self, request: Request) -> list[int]:
        """Generated tokens."""
        return self.engine.outputs[request.id]

    def reused(self, request: Request) -> int:
        """Prompt tokens that the request reused at its first admission."""
        plan = self.sequences[request.id].first_plan
        assert plan is not None, "the request was served"
        return plan.reused


@dataclass(frozen=True, eq=False)
class Subject:
    """The model under test, and the settings of the prompts."""

    model: SpanModel
    settings: Conformance

    @cached_property
    def reference_model(self) -> PreTrainedModel:
        """The same weights with the attention of transformers."""
        from spanlab.engine.oracle import eager_twin

        return eager_twin(self.model)

    @property
    def limit(self) -> float:
        """Largest relative difference of logits that rounding explains."""
        return 1e-3 if self.model.dtype.itemsize == 4 else 5e-2

    @property
    def output(self) -> int:
        """Output tokens of each prompt."""
        return self.settings.output_tokens

    def random_span(self, name: int, length: int) -> Span:
        """Dependent span of random tokens, equal for equal name and length."""
        draw = np.random.default_rng([name, length])
        return Span(draw.integers(0, self.model.vocab_size, length).astype(np.int32))

    def document(self, name: int) -> Span:
        """Independent span of random tokens; documents differ in length."""
        longest = self.settings.document_tokens
        return Span(
            self.random_span(1000 + name, max(2, longest - 5 * name % longest)).tokens,
            independent=True,
        )

    def questions(self, head: int = 7) -> list[Request]:
        """Prompts of the same documents, each in another order and with a different question."""
        documents = [self.document(number) for number in range(self.settings.documents)]
        opening = (self.random_span(0, head),) if head else ()
        return [
            self.request(
                number,
                *opening,
                *np.roll(np.array(documents, object), number),
                self.random_span(1 + number, 9),
            )
            for number in range(self.settings.prompts)
        ]

    def request(self, number: int, *spans: Span, salt: str = "") -> Request:
        """Request of these spans with id `number`."""
        return Request(number, 0, spans, self.output, cache_salt=salt)

    def start(
        self,
        strategy: Strategy,
        requests: Sequence[Request],
        rules: BatchRules = ONE_BY_ONE,
        tokens: int | None = None,
    ) -> Served:
        """Build an engine with an empty store for the requests; `tokens` limits the KV of running
        and stored tokens."""
        spec = self.settings.model
        gib = None if tokens is None else (tokens * spec.kv_bytes_per_token + 1) / GIB
        config = EngineParts(spec, self.settings.engine, rules, StoreSettings(kv_gib=gib))
        longest = max(request.num_tokens for request in requests)
        policy = build_policy(config, strategy, 0, longest)
        assert isinstance(policy, TreePolicy), "these strategies are served by trees"

        def note(sequence: Admitted, row: Tensor) -> None:
            served.note(sequence, row)

        served = Served(
            build_engine(config, strategy, self.model, policy, requests, on_logits=note),
            policy,
            rules,
        )
        return served

    def serve(
        self, strategy: Strategy, requests: Sequence[Request], rules: BatchRules = ONE_BY_ONE
    ) -> Served:
        """Serve requests from an empty store."""
        served = self.start(strategy, requests, rules)
        served.serve(requests)
        return served

    def max_difference(
        self, served: Served, requests: Sequence[Request], *, blocks: bool = False
    ) -> float:
        """Largest relative difference of the requests' logits to the dense forward of the same
        tokens."""
        from spanlab.engine.oracle import distance

        return max(
            distance(
                served.logits_of(request),
                self.dense(request, served.output(request), blocks=blocks),
            )
            for request in requests
        )

    def dense(self, request: Request, output: Sequence[int], *, blocks: bool = False) -> Tensor:
        """Logits [output, V] of a dense forward of prompt and output: causal, or block-masked where
        `blocks`."""
        import torch

        from spanlab.engine.oracle import Segment, block_mask, causal_mask, dense_logits

        ids = torch.from_numpy(
            np.concatenate([request.tokens, np.array(output[:-1], np.int64)]).astype(np.int64)
        )
        device = self.model.device
        if blocks:
            # the last span extends over the output
            ends = np.cumsum([len(span.tokens) for span in request.spans]).tolist()
            starts, ends = [0, *ends[:-1]], [*ends[:-1], len(ids)]
            segments = [
                Segment(start, end, span.independent)
                for start, end, span in zip(starts, ends, request.spans, strict=True)
            ]
            mask = block_mask(segments, device=device)
        else:
            mask = causal_mask(len(ids), device)
        positions = torch.arange(len(ids), device=device)
        return dense_logits(self.reference_model, ids.to(device), mask, positions)[
            request.num_tokens - 1 :
        ].cpu()


# ------------------------------------------------------------------------------
# Properties of plain serving: answers, prefixes, chunks and preemption, compared with forwards
# of transformers.
# ------------------------------------------------------------------------------

CHUNK = 17  # tokens per step: chunks end inside documents, blocks and grid intervals
OF_LOGITS = "relative difference of logits to a full forward"


def no_reuse() -> Strategy:
    """Strategy that stores nothing."""
    return Strategy(keep=False)


def prefixes(subject: Subject) -> Strategy:
    """Radix tree strategy; for a hybrid, with a state at every grid position."""
    if not subject.settings.model.is_hybrid:
        return Strategy()
    return Strategy(placement=PlacementSettings(kind="block", interval=subject.settings.model.grid))


@PROPERTIES.register("greedy_generation")
def greedy_generation(subject: Subject) -> Measurement:
    """Greedy tokens equal those of transformers' `generate`, except where two logits tie."""
    import torch

    requests = subject.questions()
    served = subject.serve(no_reuse(), requests, TOGETHER)
    gaps, equal, compared = [0.0], 0, 0
    for request in requests:
        # transformers may stop early at the model's end-of-text token
        ids = torch.from_numpy(request.tokens).long()[None].to(subject.model.device)
        with torch.no_grad():
            generated: Tensor = subject.reference_model.generate(  # type: ignore[operator]
                ids,
                do_sample=False,
                max_new_tokens=subject.output,
                attention_mask=torch.ones_like(ids),
            )
        ours, theirs = served.output(request), generated[0, ids.shape[1] :].tolist()
        difference_at = next(
            (
                index
                for index, pair in enumerate(zip(ours, theirs, strict=False))
                if pair[0] != pair[1]
            ),
            None,
        )
        equal, compared = equal + (difference_at is None), compared + len(theirs)
        if difference_at is not None:
            row = served.logits_of(request)[difference_at]
            gaps.append(
                float((row.max() - row[theirs[difference_at]]) / row.square().mean().sqrt())
            )
    description = f"{equal} of {len(requests)} answers equal, {compared:,} tokens"
    return Measurement(
        max(gaps),
        subject.limit,
        f"gap of logits ÷ their RMS at the first other token; {description}",
    )


@PROPERTIES.register("prefix_reuse")
def prefix_reuse(subject: Subject) -> Measurement:
    """Logits after a stored prefix equal those of a full forward."""
    # prompts that share prefixes of different lengths with the first, each with a different suffix
    grid = subject.settings.model.grid
    longest = subject.random_span(0, 2 * grid + subject.settings.document_tokens)
    cuts = np.linspace(grid + 1, len(longest.tokens) - 1, subject.settings.prompts - 1).astype(int)
    forks = [
        subject.request(number, Span(longest.tokens[:cut]), subject.random_span(100 + number, 11))
        for number, cut in enumerate(cuts.tolist(), 1)
    ]
    requests = [subject.request(0, longest), *forks]
    served = subject.serve(prefixes(subject), requests)
    reused = [served.reused(request) for request in requests[1:]]
    value = subject.max_difference(served, requests) if all(reused) else None
    return Measurement(value, subject.limit, f"{OF_LOGITS}; {sum(reused):,} tokens reused")


@PROPERTIES.register("chunked_prefill")
def chunked_prefill(subject: Subject) -> Measurement:
    """Logits of a prompt in small chunks, batched with other decodes, equal those of a full
    forward."""
    requests = subject.questions()
    served = subject.serve(
        no_reuse(), requests, BatchRules(max_num_batched_tokens=CHUNK, max_num_seqs=len(requests))
    )
    return Measurement(
        subject.max_difference(served, requests),
        subject.limit,
        f"{OF_LOGITS}; chunks of {CHUNK} tokens",
    )


@PROPERTIES.register("preemption")
def preemption(subject: Subject) -> Measurement:
    """A request that is preempted during decode resumes with the same logits."""
    first, second, *_ = subject.questions()
    tokens = first.num_tokens + second.num_tokens + subject.output // 2 + 2
    served = subject.start(no_reuse(), [first, second], TOGETHER, tokens)
    served.serve([first, second])
    times = sum(sequence.preemptions for sequence in served.sequences.values())
    value = subject.max_difference(served, [first, second]) if times else None
    return Measurement(value, subject.limit, f"{OF_LOGITS}; preempted {times} times")


# ------------------------------------------------------------------------------
# Properties of recurrent layers: resume from states at each depth, and composition of span
# maps.
# ------------------------------------------------------------------------------

NO_STATES = "the model has no recurrent layers"
DEPTHS = 3  # number of grid positions


@PROPERTIES.register("state_depth")
def state_depth(subject: Subject) -> Measurement:
    """A prompt resumes from the last shared state, with the logits of a full forward."""
    grid = subject.settings.model.grid
    if not subject.settings.model.is_hybrid:
        return not_applicable(NO_STATES)
    long = subject.random_span(0, DEPTHS * grid + 5)
    requests = [subject.request(0, long)]
    for depth in range(1, DEPTHS + 1):
        shared = Span(long.tokens[: depth * grid + 3])
        requests.append(subject.request(depth, shared, subject.random_span(100 + depth, 7)))
    served = subject.serve(prefixes(subject), requests)
    reused = [served.reused(request) for request in requests[1:]]
    exact = reused == [depth * grid for depth in range(1, DEPTHS + 1)]
    value = subject.max_difference(served, requests) if exact else None
    return Measurement(
        value, subject.limit, f"{OF_LOGITS}; resumed at {', '.join(map(str, reused))}"
    )


@PROPERTIES.register("map_composition")
def map_composition(subject: Subject) -> Measurement:
    """A span's map gives the same state as its rows in every recurrent layer; stored maps give
    equal answers."""
    from spanlab.engine.oracle import distance, map_errors

    if not subject.settings.model.is_hybrid:
        return not_applicable(NO_STATES)
    description = "relative difference of states by maps to states by rows, and warm to cold"
    errors = max(map_errors(subject.model))
    if errors > subject.limit:  # the engine would raise
        return Measurement(errors, subject.limit, description)
    strategy = Strategy(
        placement=PlacementSettings(kind="boundary"), spans=SpanSettings(maps=MapRules())
    )
    requests = subject.questions()
    warm = subject.serve(strategy, requests)
    cold = [subject.serve(strategy, [request]).logits_of(request) for request in requests]
    answers = [
        distance(warm.logits_of(request), answer)
        for request, answer in zip(requests, cold, strict=True)
    ]
    reused = all(warm.reused(request) for request in requests[1:])
    return Measurement(max(errors, *answers) if reused else None, subject.limit, description)


# ------------------------------------------------------------------------------
# Run the entry `conformance`: one verdict per property, a table, a summary.
# ------------------------------------------------------------------------------

FOLDER, SUPPORTED = "conformance", "supported_layers"


@entry(
    "conformance", Conformance, environment=lambda settings: None if settings.is_live else "engine"
)
def run_conformance(settings: Conformance, run: str, root: Path) -> bool:
    """Check all properties, write a run folder and print the table; return whether no property
    failed.

    After Ctrl-C, or where a server ends, the finished properties are written before the error is
    raised.
    """
    started, measured, facts = time.perf_counter(), Measurements(), dict[str, object]()
    with entry_folder(settings, FOLDER, run, root) as folder:
        try:
            _test(settings, folder.work, measured, facts)
        except (KeyboardInterrupt, ServerGoneError) as stop:
            if measured:
                for name in settings.chosen:
                    measured.setdefault(
                        name, Measurement(None, None, "the run ended before", without=UNTESTED)
                    )
                facts["interrupted"] = str(stop) or "Ctrl-C"
                untested = [name for name in settings.chosen if measured[name].without == UNTESTED]
                _finish(settings, measured, facts, folder, started)
                if isinstance(stop, KeyboardInterrupt):
                    stop.args = ("interrupted; what was finished is kept",)
                goes_on = (
                    f"the same command with properties=[{','.join(untested)}] tests the others"
                )
                stop.add_note(
                    f"{folder.path} has the finished properties"
                    + (f": {goes_on}" if untested else "")
                )
            raise
        _finish(settings, measured, facts, folder, started)
    return all(measurement.verdict != FAILED for measurement in measured.values())


def _test(
    settings: Conformance, folder: Path, measured: Measurements, facts: dict[str, object]
) -> None:
    """Add the measurements as they finish, and facts of the subject for the summary."""
    if settings.is_live:
        sizes = settings.prompts, settings.output_tokens, settings.model.vocab_size
        with _served(settings, folder, facts) as (server, live):
            check_server(LiveTest(server, live, *sizes), settings.chosen, folder, measured, facts)
        return
    import torch

    from spanlab.engine.load import check_support, load_model, read_config, require_exact

    facts["model"] = settings.model.name
    facts["engine"] = {"weights": settings.engine.weights, "threads": torch.get_num_threads()}
    name = settings.engine.name or settings.model.name
    layers = check_support(read_config(settings.engine, name))
    try:
        require_exact(name, layers)
    except ValueError as error:
        measured[SUPPORTED] = Measurement(None, None, str(error), without=REFUSED)
        return
    measured[SUPPORTED] = Measurement(
        0.0, 0.0, f"layers that spans cannot be reused in, of {len(layers)}"
    )
    measure(Subject(load_model(settings.engine, settings.model), settings), measured)


@contextmanager
def _served(
    settings: Conformance, folder: Path, facts: dict[str, object]
) -> Iterator[tuple[ServerSettings, LiveSettings]]:
    """Yield the settings of the server at base_url, or of one that is started and ended with the
    block."""
    server, live = settings.server, settings.live
    if server.engine == NO_ENGINE:
        yield server, live
        return
    kind = SERVERS.make(server.engine, {}, {})
    study = composed("rendezvous", [*kind.overrides, f"server.engine={server.engine}"])
    assert isinstance(study, Study), "the entry is a study"
    study = replace(study, model=settings.model, engine=settings.engine, server=server)
    kind.check(study)
    longest = live.largest_prompt + max(live.long_output, settings.output_tokens)
    with running(Launch(study, folder / "server", free_port(server.port), longest)) as started:
        facts["started"] = {"engine": server.engine, "version": kind.version}
        reset_path = server.reset_path or kind.reset_path
        server = replace(
            server,
            engine=NO_ENGINE,
            port=None,
            arguments=[],
            base_url=started.base_url,
            reset_path=reset_path,
        )
        yield (
            server,
            replace(live, chunk_tokens=live.chunk_tokens or study.batch.max_num_batched_tokens),
        )


def _finish(
    settings: Conformance,
    measured: Measurements,
    facts: dict[str, object],
    folder: RunFolder,
    started: float,
) -> None:
    table = verdict_table(settings.subject, measured)
    packages = PACKAGES_OF["server" if settings.is_live else "engine"]
    results = {"properties": verdict_rows(measured)} | run_facts(
        time.perf_counter() - started, packages
    )
    write_results(facts | results, [table], folder.work)
    publish(folder, [table])


def measure(subject: Subject, measured: Measurements | None = None) -> Measurements:
    """Measure each chosen property of a loaded model, and add it to those that were measured
    before."""
    measured = Measurements() if measured is None else measured
    for name in subject.settings.chosen:
        measured[name] = PROPERTIES[name](subject=subject)
    return measured


# ------------------------------------------------------------------------------
# Properties of spans that are reused at other positions (PIC).
# ------------------------------------------------------------------------------

FORMS = {
    "rotate_queries": SpanSettings(),
    "rotate_keys": SpanSettings(keys="raw", kernel="rotate_keys"),
    "pre_rotated": SpanSettings(kernel="pre_rotated", sharing="private"),
}


@PROPERTIES.register("span_reuse")
def span_reuse(subject: Subject) -> Measurement:
    """In every form of rotation, stored or not, logits equal those of a dense forward with a
    block-diagonal mask."""
    if subject.settings.model.is_hybrid:
        return not_applicable("spans of hybrids are composed, see map_composition")
    requests, worst, reused = subject.questions(), 0.0, []
    for form in FORMS.values():
        alone, packed = (
            subject.serve(Strategy(spans=form), requests, rules) for rules in (ONE_BY_ONE, TOGETHER)
        )
        worst = max(
            worst,
            *(subject.max_difference(served, requests, blocks=True) for served in (alone, packed)),
        )
        reused += [alone.reused(request) for request in requests[1:]]
    value = worst if all(reused) else None
    return Measurement(
        value,
        subject.limit,
        f"relative difference of logits to a block-masked forward; {', '.join(FORMS)}",
    )


# ------------------------------------------------------------------------------
# Properties of stored entries: tenant isolation, and copy-on-write.
# ------------------------------------------------------------------------------

BLOCK = 16  # tokens; a repair then writes to a part of a page


@PROPERTIES.register("tenant_isolation")
def tenant_isolation(subject: Subject) -> Measurement:
    """A prompt reuses entries of its tenant, and no entry of another tenant."""
    spans = (subject.random_span(0, 2 * subject.settings.model.grid + 9), subject.random_span(1, 5))
    requests = [
        subject.request(number, *spans, salt=salt) for number, salt in enumerate(("a", "a", "b"))
    ]
    served = subject.serve(prefixes(subject), requests)
    own_tokens, other_tokens = (served.reused(request) for request in requests[1:])
    return Measurement(
        float(other_tokens) if own_tokens else None,
        0.0,
        f"tokens reused of another tenant; {own_tokens:,} of its own are",
    )


@PROPERTIES.register("copy_on_write")
def copy_on_write(subject: Subject) -> Measurement:
    """Stored pages do not change while requests repair the spans in them."""
    if subject.settings.model.is_hybrid:
        return not_applicable("spans of hybrids are not repaired")
    requests = subject.questions()
    strategy = Strategy(block_size=BLOCK, spans=SpanSettings(repair=Repair(kind="first", k=4)))
    served = subject.start(strategy, requests)
    served.serve(requests[:1])
    engine = served.engine
    stored = {page: engine.pool.checksum([page]) for page in engine.nodes.all()}
    served.serve(requests[1:])
    remaining = stored.keys() & set(engine.nodes.all())
    changed = sum(engine.pool.checksum([page]) != stored[page] for page in remaining)
    reused = sum(served.reused(request) for request in requests[1:])
    value = float(changed) if remaining and reused else None
    return Measurement(value, 0.0, f"stored pages that changed, of {len(remaining)}")
