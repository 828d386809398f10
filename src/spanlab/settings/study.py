"""The root schema of a study."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from spanlab.core.admission import BatchRules
from spanlab.core.policies.named import POLICIES
from spanlab.core.tiers import FORMAT_BITS
from spanlab.engine.settings import EngineSettings, reads_baseline
from spanlab.model_files import EMBEDDER, MODELS, choices, find_spec, is_ready, names_file, packaged
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.registry import (
    REQUIRED,
    check_seeds,
    located,
    one_of,
    positive,
    require,
    share_below_one,
)
from spanlab.settings.analyses import (
    ANALYSES,
    ARMS,
    DESIGNED,
    LABELS,
    LOG,
    MEASURED,
    POINTS,
    Analyses,
    full_key,
    short_key,
)
from spanlab.settings.arms import Strategy, check_arm, check_names, leaves
from spanlab.settings.server import (
    NO_ENGINE,
    SERVER,
    ExecutorSettings,
    LoadSweep,
    OutputSettings,
    ServerSettings,
    StoreSettings,
    TrackingSettings,
    check_address,
)
from spanlab.workloads.load import OfText, WorkloadSettings
from spanlab.workloads.workload import SOURCES
from spanlab_sim.arrivals import Arrivals
from spanlab_sim.routing import Replicas
from spanlab_sim.timings import Roofline, Timing

BACKENDS = ("sim", "engine", SERVER)


@dataclass
class RunSettings:
    """The runs of a study, and how they are counted and compared.

    `only`             names of the arms to run; empty: all
    `baseline`         arm that speedups are relative to
    `seeds`            seeds of arrivals and popularity; one run per seed and arm
    `repeats`          runs of the same arrivals on the engine; their differences are its noise
                       (A/A)
    `warmup_fraction`  share of the requests that are served but not counted
    `count_hit_as`     token that makes a request a hit in the request hit rate: reused or matched
    `load`             additional arrival rates for some arms
    `sweep`            values of settings to run the study at: KEY=A,B,C each, one setting at a
                       time, or KEY=A,B KEY=C,D for every combination
    """

    only: list[str] = field(default_factory=list)
    baseline: str = "none"
    seeds: list[int] = field(default_factory=lambda: [0])
    repeats: int = 1
    warmup_fraction: float = 0.0
    count_hit_as: str = "reused"
    load: LoadSweep = field(default_factory=LoadSweep)
    sweep: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        share_below_one("warmup_fraction", self.warmup_fraction)
        one_of("count_hit_as", self.count_hit_as, ("reused", "matched"))
        positive("repeats", self.repeats)
        check_seeds("seeds", self.seeds)


@dataclass
class Study:
    """A study: one workload through several arms under one scheduler, one budget and one trace.

    `workload`   the requests
    `arrivals`   the arrival process
    `model`      sizes of the model
    `hardware`   compute and memory rates of the device
    `timing`     duration of a simulated step
    `batch`      limits of a step
    `store`      memory budget of each replica
    `replicas`   replicas behind one router
    `arms`       arms by name: the strategies to compare
    `runs`       the runs of the arms
    `backend`    sim: a timing model predicts each step; engine: a model on a device computes it;
                 server: requests are sent to a real server, which the arm, model and store must
                 describe
    `engine`     the model of backend=engine
    `server`     the server of backend=server, and the requests to it
    `analyses`   analyses to report, and the options of each
    `output`     the run folder
    `tracking`   experiment tracking
    `plugins`    Python files (mine.py) or modules to import, which register further names
    `executor`   the processes that run the arms
    """

    workload: WorkloadSettings = REQUIRED
    arrivals: Arrivals = REQUIRED
    model: ModelSpec = REQUIRED
    hardware: HardwareSpec = REQUIRED
    timing: Timing = field(default_factory=Roofline)
    batch: BatchRules = field(default_factory=BatchRules)
    store: StoreSettings = field(default_factory=StoreSettings)
    replicas: Replicas = field(default_factory=Replicas)
    arms: dict[str, Strategy] = field(default_factory=dict)
    runs: RunSettings = field(default_factory=RunSettings)
    backend: str = "sim"
    engine: EngineSettings = field(default_factory=EngineSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    analyses: Analyses = field(default_factory=lambda: ANALYSES.section()())
    output: OutputSettings = field(default_factory=OutputSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    plugins: list[str] = field(default_factory=list)
    executor: ExecutorSettings = field(default_factory=ExecutorSettings)

    def __post_init__(self) -> None:
        one_of("backend", self.backend, BACKENDS)
        self.plugins = [located(name) for name in self.plugins]
        self.batch.check("batch")
        # arms on one device share one process
        if self.backend == "engine" and self.executor.workers not in (None, 1):
            raise ValueError(
                f"workers={self.executor.workers} with backend=engine: expected 1, for arms share one device"
            )
        if self.executor.kind == "dask" and self.backend == "engine":
            raise ValueError(
                "executor.kind=dask with backend=engine: expected local, for arms share one device"
            )
        if self.executor.kind == "dask" and self.executor.workers is not None:
            raise ValueError(
                f"workers={self.executor.workers} with executor.kind=dask: expected null, for the scheduler has workers"
            )
        self._check_replicas()
        if not self.arms:
            raise ValueError(
                "arms is empty: expected at least one strategy, as in arms=checkpoints"
            )
        if self.runs.load.rates_rps and self.arrivals.rate_rps is None:
            raise ValueError(
                f"load.rates_rps={self.runs.load.rates_rps} with arrivals.kind={self.arrivals.kind}: no rate to set"
            )
        for key, value in self.workload.pace().items():
            if self.arrivals.kind != "as_given":
                raise ValueError(
                    f"{key}={value} with arrivals.kind={self.arrivals.kind}: expected as_given"
                )
        if not self.draws_arrivals():
            load = replace(self.runs.load, seeds=self.runs.load.seeds[:1])
            self.runs = replace(self.runs, seeds=self.runs.seeds[:1], load=load)
        if self.runs.baseline != "none" or "none" in self.arms:
            one_of("baseline", self.runs.baseline, self.arms)
        check_names("only", self.runs.only, self.arms, is_read=True)
        check_names(
            "load.arms", self.runs.load.arms, self.arms, is_read=bool(self.runs.load.rates_rps)
        )
        for name, arm in self.arms.items():
            check_arm(name, arm, self.model)
        settle_packaged(self)
        check_tiers(self)
        check_speculation(self)
        check_priced(self)
        check_passages(self)
        check_replay(self)
        check_shares(self)
        check_analyses(self)
        check_design(self)

    def _check_replicas(self) -> None:
        """Raise ValueError for replicas with an engine, a trace file or a clairvoyant arm."""
        for key, value, only in (
            ("backend", self.backend, "sim"),
            ("output.trace", self.output.trace, False),
        ):
            if self.replicas.count > 1 and value != only:
                raise ValueError(
                    f"replicas.count={self.replicas.count} with {key}={value}: expected 1, or {key}={only}"
                )
        for name, arm in self.arms.items():
            if self.replicas.count > 1 and arm.foresees:
                raise ValueError(
                    f"arms.{name}.{arm.foresees} with replicas.count={self.replicas.count}: expected replicas.count=1"
                )

    def draws_arrivals(self) -> bool:
        """Return whether runs depend on the seed; recorded arrivals do not."""
        return self.workload.popularity.requests is not None or self.arrivals.draws

    def changed(self, **values: Any) -> Study:
        """Return the study with other values of keys, each by its short name."""
        changes: dict[str, Any] = {}
        for name, value in values.items():
            section, *below = full_key(name).split(".")
            changes[section] = _changed(changes.get(section, getattr(self, section)), below, value)
        return replace(self, **changes)

    def chosen(self) -> list[str]:
        """Return the names of the arms to run, in the order of `arms`."""
        return [name for name in self.arms if not self.runs.only or name in self.runs.only]

    def needs(self, need: str) -> bool:
        """Return whether an analysis of the study declares `need`."""
        return not set(ANALYSES.needing(need)).isdisjoint(self.chosen_analyses())

    @property
    def serves(self) -> bool:
        """Whether the study serves requests; an analysis of a log reads the log itself."""
        return not self.needs(LOG)

    @property
    def runs_engine(self) -> bool:
        """Whether our engine computes: as the backend, or beside a server."""
        beside = "rendezvous" in self.chosen_analyses() and self.analyses.rendezvous.engine
        return self.backend == "engine" or bool(beside)

    @property
    def folder(self) -> str:
        """Folder of the runs below `output.root`: the workload, or an analysis that does not run
        the arms itself."""
        return (
            self.chosen_analyses()[0]
            if self.needs(LOG) or self.needs(POINTS)
            else self.workload.kind
        )

    def chosen_analyses(self) -> list[str]:
        """Return the names of the analyses, in the order of the report."""
        if (names := self.analyses.names) is not None:
            return names
        if self.workload.kind == DESIGNED:
            return ["fit_profile"]
        if self.runs.repeats > 1 or self.runs.load.shares:
            return ["compare_backends"]
        if self.store.tiers:
            return ["summary", "tiers"]
        if self.backend == SERVER:
            return ["serving"]
        return ["summary", "compare_backends"] if self.backend == "engine" else ["summary"]


def _changed(settings: Any, keys: list[str], value: Any) -> Any:
    if not keys:
        return value
    return replace(settings, **{keys[0]: _changed(getattr(settings, keys[0]), keys[1:], value)})


def worker_count(study: Study, jobs: int) -> int:
    """Return the number of worker processes: at most one per job, and one where jobs share a
    device."""
    if study.backend in ("engine", SERVER):
        return 1
    return max(1, min(jobs, study.executor.workers or os.cpu_count() or 1))


# ------------------------------------------------------------------------------
# Checks of a study with its analyses; each analysis adds its own.
# ------------------------------------------------------------------------------

_PACED = ("poisson", "gamma", "deterministic")


def check_analyses(study: Study) -> None:
    """Raise ValueError for an analysis whose input the study does not produce."""
    if study.analyses.names is not None and not study.analyses.names:
        raise ValueError(f"analyses=[]: expected one or more of {', '.join(ANALYSES)}")
    for name in study.chosen_analyses():
        one_of("analyses", name, ANALYSES)
        if name in ANALYSES.needing(MEASURED) and study.backend != "engine":
            raise ValueError(
                f"analyses={name} with backend={study.backend}: expected backend=engine"
            )
        if name in ANALYSES.needing(ARMS) and study.backend == "server":
            raise ValueError(
                f"analyses={name} with backend=server: expected serving, for a server reports no causes"
            )
        if (name == "fit_profile") != (study.workload.kind == DESIGNED):
            raise ValueError(
                f"analyses={name} with workload.kind={study.workload.kind}: expected fit_profile with {DESIGNED}"
            )
        if name in ANALYSES.needing(LABELS) and study.workload.popularity.requests is not None:
            drawn = f"workload.popularity.requests={study.workload.popularity.requests}"
            raise ValueError(
                f"{drawn} with analyses={name}: expected null, for it groups requests by number"
            )
        # of repeats that would be equal or unread; `check_design` checks those of designed shapes
        if study.runs.repeats > 1 and study.backend != "engine":
            raise ValueError(
                f"repeats={study.runs.repeats} with backend={study.backend}: expected 1, for runs would be equal"
            )
        if study.runs.repeats > 1 and name not in ("compare_backends", "fit_profile"):
            raise ValueError(
                f"repeats={study.runs.repeats} with analyses={name}: expected repeats=1, or more seeds"
            )
    for name in ANALYSES:
        analysis = ANALYSES[name]
        if name in study.chosen_analyses():
            analysis.check(study)
        elif analysis.options is not None and getattr(study.analyses, name) != (
            usual := analysis.options()
        ):
            if analysis.check_unread is None:
                _refuse_unread(study, name, usual)
            else:
                analysis.check_unread(study)
    check_teacher(study)
    # its arms are the rows of a sweep
    if study.runs.sweep and "summary" not in study.chosen_analyses():
        analyses = study.chosen_analyses()
        expected = "expected sweep=[], or summary among them"
        raise ValueError(f"sweep={study.runs.sweep} with analyses={analyses}: {expected}")
    clients = study.arrivals.clients
    if study.engine.alternate and clients != 1:
        raise ValueError(
            f"engine.alternate=true with arrivals.clients={'null' if clients is None else clients}: "
            "expected arrivals=closed_loop with 1"
        )


def _refuse_unread(study: Study, name: str, usual: Any) -> None:
    """Raise ValueError for an option of an analysis that the study does not choose."""
    expected = dict(leaves(asdict(usual)))
    for key, value in leaves(asdict(getattr(study.analyses, name))):
        if value != expected.get(key):
            given = f"{short_key(f'analyses.{name}.{key}')}={value}"
            raise ValueError(
                f"{given} with analyses={study.chosen_analyses()}: expected {name} among them"
            )


def check_teacher(study: Study) -> None:
    """Raise ValueError if the teacher, or the reference of scores, is not among the arms that
    run."""
    engine = study.engine
    if reads_baseline(engine) and study.runs.baseline not in study.chosen():
        key = f"engine.teacher={engine.teacher} with engine.record={engine.record}"
        raise ValueError(f"{key}: expected baseline={study.runs.baseline} among the arms that run")


def check_design(study: Study) -> None:
    """Raise ValueError for settings that a study of designed shapes does not read."""
    if study.workload.kind != DESIGNED:
        return
    require(
        f"workload.kind={DESIGNED}",
        ("backend", study.backend, "engine"),
        ("arrivals.kind", study.arrivals.kind, "as_given"),
        ("engine.clock", study.engine.clock, "virtual"),
        ("engine.alternate", study.engine.alternate, False),
        ("repeats", study.runs.repeats, 1),
        ("warmup_fraction", study.runs.warmup_fraction, 0.0),
        ("load.rates_rps", study.runs.load.rates_rps, []),
    )
    for key in ("longest", "outputs"):
        if getattr(study.analyses.compare_backends, key) is None:
            raise ValueError(
                f"design.{key}=null with workload.kind={DESIGNED}: expected a number of tokens"
            )


def check_shares(study: Study) -> None:
    """Raise ValueError for `load.shares` where arrivals cannot be scaled to a share of
    saturation."""
    arrivals, shares = study.arrivals, study.runs.load.shares
    if not shares:
        return
    if study.backend != "engine":
        raise ValueError(
            f"load.shares={shares} with backend={study.backend}: expected backend=engine"
        )
    if study.runs.sweep:
        raise ValueError(f"sweep={study.runs.sweep} with load.shares={shares}: expected sweep=[]")
    if len(study.runs.seeds) != 1:
        raise ValueError(
            f"seeds={study.runs.seeds} with load.shares: expected one seed, whose arrivals are repeated"
        )
    if study.runs.baseline not in study.chosen():
        raise ValueError(
            f"baseline={study.runs.baseline} with load.shares: expected one of the arms that run"
        )
    if arrivals.kind not in _PACED or study.workload.kind == "ragpulse":
        kinds = f"arrivals.kind={arrivals.kind} and workload.kind={study.workload.kind} with load.shares"
        raise ValueError(
            f"{kinds}: expected arrivals that can be paced, {', '.join(_PACED)}, and no recorded times"
        )
    if arrivals.rate_rps != 1.0:
        raise ValueError(
            f"arrivals.rate_rps={arrivals.rate_rps} with load.shares: expected 1, for shares of saturation set it"
        )


# ------------------------------------------------------------------------------
# Hydra config source of the group `model`: it converts a Hugging Face config.json to a
# ModelSpec.
# ------------------------------------------------------------------------------

_GROUP = "model/"


class ModelSource(ConfigSource):
    """Resolve `model=NAME`, `model=FILE`, `model=FOLDER` and hub names before Hydra reads the files
    of conf/.

    Those files hold the keys of a config.json. Other names are left to the next source, such as
    --config-dir.
    """

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source in the search path."""
        return "model"

    def available(self) -> bool:
        """Return True: the source has no requirements."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return False: the folder conf/model declares the group."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Return whether a path is a choice of `model` that this source can resolve."""
        name = config_path.removeprefix(_GROUP)
        return name != config_path and (name in choices() or names_file(name))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the fields of the ModelSpec as a config."""
        sizes: Any = OmegaConf.create(asdict(find_spec(config_path.removeprefix(_GROUP))))
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=sizes, header={"package": None}
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return no names: the folder conf/model lists its files."""
        return []


class _Models(SearchPathPlugin):
    """Search path plugin that puts the source before the folder conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Prepend the source."""
        search_path.prepend(provider="spanlab", path=f"{ModelSource.scheme()}://")


def register_models() -> None:
    """Register the source with Hydra; safe to call again."""
    for plugin in (ModelSource, _Models):
        Plugins.instance().register(plugin)


# ------------------------------------------------------------------------------
# Checks of memory tiers: against each other, the arms, the model and the backend.
# ------------------------------------------------------------------------------

BACKFILL = "state_backfill"


def check_tiers(study: Study) -> None:
    """Raise ValueError for invalid tiers, and for settings that need tiers where none is set."""
    tiers = {f"store.tiers.{name}": rules for name, rules in study.store.tiers.items()}
    if not tiers:
        _check_without(study)
        return
    for path, rules in tiers.items():
        rules.check(path)
        if rules.quantise_to is not None and study.model.is_hybrid:
            raise ValueError(
                f"{path}.action=quantise with model.name={study.model.name}: expected evict or "
                "demote, for recurrent states are not quantised"
            )
        if rules.quantise_to and FORMAT_BITS[rules.quantise_to] >= 8 * study.model.kv_itemsize:
            raise ValueError(
                f"{path}.quantise_to={rules.quantise_to} with model.kv_itemsize="
                f"{study.model.kv_itemsize}: expected fewer bits"
            )
    for (above, upper), (below, lower) in pairwise(tiers.items()):
        if lower.write == "back" and upper.action != "demote":
            raise ValueError(
                f"{below}.write=back with {above}.action={upper.action}: expected {above}.action=demote"
            )
    path, last = list(tiers.items())[-1]
    if last.action == "demote":
        raise ValueError(
            f"{path}.action=demote: expected evict or quantise, for no tier is below it"
        )
    _check_arms(study)
    if study.replicas.count > 1:
        count = f"replicas.count={study.replicas.count}"
        raise ValueError(
            f"store.tiers={_names(study)} with {count}: expected 1, for tiers belong to one engine"
        )
    if study.model.has_windows:
        reason = "which blocks of a window go to lower tiers is not modelled"
        raise ValueError(
            f"store.tiers={_names(study)} with model.name={study.model.name}: expected none, for {reason}"
        )
    if study.backend != "sim":
        raise ValueError(
            f"store.tiers={_names(study)} with backend={study.backend}: expected backend=sim"
        )
    if not study.serves:
        raise ValueError(
            f"store.tiers={_names(study)} with analyses={study.analyses.names}: expected store.tiers={{}}"
        )


def _names(study: Study) -> str:
    return f"[{', '.join(study.store.tiers)}]"


def _check_without(study: Study) -> None:
    for name in study.chosen():
        if study.arms[name].recovery == BACKFILL:
            key = f"arms.{name}.recovery={BACKFILL} without store.tiers"
            raise ValueError(f"{key}: expected a tier, as in +tier@store.tiers.host=dram")
    for name, arm in study.arms.items():
        if arm.pool is not None and arm.pool.load_when is not None:
            path = f"arms.{name}.pool.load_when={arm.pool.load_when}"
            raise ValueError(
                f"{path} without store.tiers: expected null, or a tier, as in +tier@store.tiers.host=dram"
            )
    if "tiers" in study.chosen_analyses():
        raise ValueError(
            "analyses=tiers without store.tiers: expected a tier, as in +tier@store.tiers.host=dram"
        )


def _check_arms(study: Study) -> None:
    """Raise ValueError for arms that run and have no blocks, which tiers store."""
    arms = {name: study.arms[name] for name in study.chosen()}
    of_states = [name for name, arm in arms.items() if arm.recovery == BACKFILL]
    for name in of_states:
        _check_backfill(study, name)
    for name, arm in arms.items():
        # beside arms with backfill it is a baseline
        if arm.policy_name != "blocks" and not of_states:
            raise ValueError(
                f"arms.{name} with store.tiers={_names(study)}: expected arms.{name}.pool, "
                f"for tiers hold hashed blocks, or an arm with recovery={BACKFILL}"
            )


def _check_backfill(study: Study, name: str) -> None:
    """Raise ValueError for tier settings that states do not support."""
    for tier, rules in study.store.tiers.items():
        for key, values in (("write", ("through", "back")), ("load", ("blocking",))):
            value = getattr(rules, key)
            if value not in values:
                pair = f"store.tiers.{tier}.{key}={value} with arms.{name}.recovery={BACKFILL}"
                raise ValueError(f"{pair}: expected {' or '.join(values)}")


# ------------------------------------------------------------------------------
# Checks of a study with speculative decoding.
# ------------------------------------------------------------------------------

_PAIRS = "such a drafter's KV goes with pairs of tokens (SGLang keys its tree by them), which is not modelled here"


def check_speculation(study: Study) -> None:
    """Raise ValueError where drafts cannot be verified or rolled back."""
    key = f"batch.speculation.draft_tokens={study.batch.speculation.draft_tokens}"
    if not study.batch.speculation.draft_tokens:
        return
    if study.backend != "sim":
        raise ValueError(
            f"{key} with backend={study.backend}: expected 0, for that backend has no drafter"
        )
    if study.timing.kind == "calibrated":
        raise ValueError(
            f"{key} with timing.kind=calibrated: expected 0, for no drafts were measured"
        )
    for name in study.chosen():
        if study.arms[name].spans is not None:
            reason = "verifying drafts on spans read at other positions is not modelled"
            raise ValueError(f"{key} with arms.{name}.spans: expected 0, for {reason}")
        arm = study.arms[name]
        if study.model.is_hybrid and not POLICIES.takes(arm.policy_name, "drafts"):
            reason = "a rejected draft needs the recurrent state before it, which only a pool of blocks keeps"
            setting = f"arms.{name}.policy={arm.policy_name} and model.name={study.model.name}"
            raise ValueError(f"{key} with {setting}: expected 0 or policy=blocks, for {reason}")
    if study.batch.speculation.has_kv:
        _check_kv(study)
    if study.batch.speculation.reach > 1:
        key = f"batch.speculation.modules={study.batch.speculation.modules}"
        if study.model.is_hybrid:
            reason = "vLLM never ends a prompt of which a block's boundary stands among the tokens that they read ahead"
            raise ValueError(f"{key} with model.name={study.model.name}: expected 1, for {reason}")
        for name in study.chosen():
            arm = study.arms[name]
            if arm.keep and not POLICIES.takes(arm.policy_name, "drafter"):
                raise ValueError(
                    f"{key} with arms.{name}.policy={arm.policy_name}: expected 1, or a pool of blocks"
                )


def _check_kv(study: Study) -> None:
    """Raise ValueError for a drafter with KV where its cache hits or its memory are not
    modelled."""
    key = f"batch.speculation.method={study.batch.speculation.method}"
    if not study.serves:
        raise ValueError(
            f"{key} with analyses={study.chosen_analyses()}: expected ngram, for nothing is served"
        )
    if study.store.tiers:
        reason = (
            "vLLM holds a drafter's last blocks back from lower tiers, which is not modelled here"
        )
        raise ValueError(
            f"{key} with store.tiers={list(study.store.tiers)}: expected none, for {reason}"
        )
    for name in study.chosen():
        arm = study.arms[name]
        ruled = arm.match == "block_hash" and POLICIES.takes(arm.policy_name, "rules")
        if arm.keep and not (ruled or POLICIES.takes(arm.policy_name, "drafter")):
            expected = "expected a pool of blocks, match=block_hash or keep=false"
            raise ValueError(
                f"{key} with arms.{name}.policy={arm.policy_name}: {expected}, for {_PAIRS}"
            )


# ------------------------------------------------------------------------------
# Checks of arms that choose or reorder passages.
# ------------------------------------------------------------------------------


def check_passages(study: Study) -> None:
    """Raise ValueError for `passages` of an arm on several replicas, on tiers or on a real
    server."""
    for name in study.chosen():
        passages = study.arms[name].passages
        if passages.are_default:
            continue
        chosen = f"arms.{name}.passages.order={passages.order}, view={passages.view}"
        if study.backend == "server":
            raise ValueError(
                f"{chosen} with backend=server: expected given and all, or backend=sim"
            )
        if study.replicas.count > 1:
            raise ValueError(
                f"{chosen} with replicas.count={study.replicas.count}: expected given and all"
            )
        if study.store.tiers:
            raise ValueError(f"{chosen} with store.tiers: expected given and all")


# ------------------------------------------------------------------------------
# Models that are installed as Python packages: checks, and the tokenizer of a packaged model.
# ------------------------------------------------------------------------------


def settle_packaged(study: Study) -> None:
    """Raise ValueError for an unknown packaged model, and set its tokenizer if the study names
    none."""
    engine, workload = study.engine, study.workload
    if engine.weights != "package":
        return
    key = "model" if engine.name is None else "engine.name"
    model = packaged(engine.name or study.model.name, f"engine.weights=package with {key}")
    if (
        isinstance(workload, OfText)
        and workload.tokenizer is None
        and SOURCES.takes(workload.reader, "tokenizer")
    ):
        workload.tokenizer = model.name


def lacks_package(study: Study) -> bool:
    """Return whether the study reads a packaged model that is neither installed nor unpacked
    here."""
    model_name = study.engine.name or study.model.name
    names = {study.workload.tokenizer, model_name if study.engine.weights == "package" else None}
    models = [MODELS[name] for name in names if name in MODELS]
    models += [EMBEDDER] * study.workload.embeds
    return any(not (is_ready(model) or model.is_installed) for model in models)


# ------------------------------------------------------------------------------
# Checks of a real server, and of prices that the timing model does not have.
# ------------------------------------------------------------------------------


def check_replay(study: Study) -> None:
    """Raise ValueError for an address without backend=server, and for settings that a server cannot
    follow."""
    if study.backend != SERVER:
        if study.server.base_url is not None:
            raise ValueError(
                f"base_url={study.server.base_url} with backend={study.backend}: expected backend=server"
            )
        return
    if study.server.base_url is None and study.server.engine == NO_ENGINE:
        raise ValueError(
            "base_url is not set with backend=server: expected the address of a server, http://HOST:PORT"
        )
    if study.server.base_url is not None:
        check_address("base_url", study.server.base_url)
    if len(study.chosen()) != 1:
        raise ValueError(
            f"only={study.runs.only} with backend=server: expected one arm, for the server is one"
        )
    if study.executor.workers not in (None, 1):
        raise ValueError(f"workers={study.executor.workers} with backend=server: expected 1")
    if study.executor.kind != "local":
        raise ValueError(f"executor.kind={study.executor.kind} with backend=server: expected local")


def check_priced(study: Study) -> None:
    """Raise ValueError for recoveries and formats without a backend or without a cost in the timing
    model."""
    for name in study.chosen():
        for key, usual in (("recovery", "recompute"), ("state_format", "native")):
            value = getattr(study.arms[name], key)
            setting = f"arms.{name}.{key}={value}"
            if value != usual and study.backend != "sim":
                raise ValueError(
                    f"{setting} with backend={study.backend}: expected {usual}, or backend=sim"
                )
            if value != usual and study.timing.kind != "roofline":
                raise ValueError(
                    f"{setting} with timing.kind={study.timing.kind}: expected roofline, which counts FLOPs"
                )
