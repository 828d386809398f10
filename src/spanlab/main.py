"""The Hydra face: entries of conf/ become settings, settings become runs, mistakes become one sentence."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from spanlab.cli.arguments import CommandLine, read
from spanlab.cli.describe import listing, usage
from spanlab.cli.environments import settle, start_in
from spanlab.compiled import HOME
from spanlab.errors import is_user_error, sentence
from spanlab.plugins import load_plugins
from spanlab.settings import (
    Compare,
    MakeShape,
    Schedule,
    Study,
    conformance,
    first_light,
    probe,
    refuse_strangers,
    schemas,
    tail_replay,
)
from spanlab.settings.conformance import Conformance
from spanlab.settings.export import Export
from spanlab.settings.first_light import FirstLight
from spanlab.settings.models import register_models
from spanlab.settings.probe import HybridAnswers, TrainProbe
from spanlab.settings.tail_replay import TailReplay
from spanlab.study.output.folder import folder_name
from spanlab.study.output.provenance import commit
from spanlab.terminal import use_twins

CONF = HOME / "conf"


def register() -> None:
    """Make schemas, models and the resolver known to Hydra; safe to call again."""
    OmegaConf.register_new_resolver("spanlab_root", lambda: str(HOME), replace=True)
    register_models()
    _register_schemas()


@cache
def _register_schemas() -> None:
    """Once for each process: making nodes of all schemas takes longer than anything else here."""
    store = ConfigStore.instance()
    of_entries = probe.schemas() | tail_replay.SCHEMAS | conformance.SCHEMAS | first_light.SCHEMAS
    for (group, name), schema in (schemas() | of_entries).items():
        store.store(name=name, node=schema, group=group)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="smoke")
def _entry(config: DictConfig) -> None:
    with _in_one_sentence():
        settings = as_settings(config)
        if HydraConfig.get().mode == RunMode.RUN:  # jobs of -m run in processes that cannot start again
            settle(settings)
        if isinstance(settings, MakeShape):
            _make_shape(settings)
        elif isinstance(settings, Schedule):
            _schedule(settings)
        elif isinstance(settings, Compare):
            _compare(settings)
        elif isinstance(settings, Export):
            _export(settings)
        elif isinstance(settings, (TrainProbe, HybridAnswers, TailReplay)):
            _run_probe(settings)
        elif isinstance(settings, Conformance):
            _run_conformance(settings)
        elif isinstance(settings, FirstLight):
            _run_first_light(settings)
        else:
            assert isinstance(settings, Study), "every other entry is a study"
            _run_study(settings)


def _make_shape(settings: MakeShape) -> None:
    from spanlab.workloads import make_shape

    print(make_shape(**vars(settings)))


def _schedule(settings: Schedule) -> None:
    from spanlab.schedule.run import run_schedule

    run_schedule(settings)


def _compare(settings: Compare) -> None:
    from spanlab.study.entries.compare_runs import run_compare

    run_compare(settings, _run_name("compare", settings.output.run), HOME / settings.output.root)


def _export(settings: Export) -> None:
    from spanlab.study.entries.export import run_export

    print(run_export(settings, HOME / "outputs"))


def _run_probe(settings: TrainProbe | HybridAnswers | TailReplay) -> None:
    from spanlab.study.entries.hybrid_answers import run_hybrid_answers
    from spanlab.study.entries.tail_replay import run_tail_replay
    from spanlab.study.entries.train_probe import run_train_probe

    run, root = _run_name(str(HydraConfig.get().job.config_name), settings.output.run), HOME / settings.output.root
    if isinstance(settings, TrainProbe):
        run_train_probe(settings, run, root)
    elif isinstance(settings, TailReplay):
        run_tail_replay(settings, run, root)
    else:
        run_hybrid_answers(settings, run, root)


def _run_conformance(settings: Conformance) -> None:
    from spanlab.study.conformance.run import run_conformance

    run = _run_name("conformance", settings.output.run)
    if not run_conformance(settings, run, HOME / settings.output.root):
        sys.exit(1)


def _run_first_light(settings: FirstLight) -> None:
    from spanlab.study.entries.first_light import run_first_light

    if not run_first_light(settings, HOME):
        sys.exit(1)


def _run_study(settings: Study) -> None:
    from spanlab.study.run import run_study
    from spanlab.study.sweep.compose_points import PointComposer
    from spanlab.study.sweep.run import Entry, run_sweep

    name = str(HydraConfig.get().job.config_name)
    settings.output.run = _run_name(name, settings.output.run)
    root = HOME / settings.output.root  # an absolute root replaces HOME
    if settings.sweep:
        composer = PointComposer(name, HydraConfig.get().overrides.task, as_settings)
        run_sweep(settings, Entry(name, composer, partial(sentence, conf=CONF)), root)
    else:
        run_study(settings, name, root)


def _run_name(entry: str, given: str) -> str:
    """The entry and what was set on the command line, so that other settings never replace this run.

    A given name alone would be that of every job of `-m`.
    """
    hydra_run = HydraConfig.get()
    if given and hydra_run.mode != RunMode.MULTIRUN:
        return given
    return folder_name(",".join(filter(None, (given or entry, hydra_run.job.override_dirname))))


def main() -> None:
    """The console script: exit code 0, 1 for a mistake said in one sentence, 130 for Ctrl-C, 143 for SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    use_twins()
    logging.raiseExceptions = False  # a log that cannot be written, such as wandb's on a full disk, is no news
    with _in_one_sentence():
        register()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of saying them in many lines
        line = read(sys.argv[1:])
        if line.asks:
            print(_answer(line))
            return
        if line.many:
            settle(_first_job(line))
        sys.argv[1:] = line.arguments
        try:
            _entry()
        except MissingConfigException as missing:  # a launcher of another environment
            if "submitit" in str(missing):
                start_in("cluster")
            raise


def _answer(line: CommandLine) -> str:
    """What the command line asks for instead of a run."""
    if line.asks == "version":
        return f"spanlab {importlib.metadata.version('spanlab')}, commit {commit()}"
    if line.asks == "list" and line.kind == "arms" and "-cn" in line.arguments:
        return "\n".join(compose(line.entry, line.overrides, line.searched).arms)
    if line.asks == "list":
        return listing(line.kind)
    if line.asks == "help":
        return usage(line.entry, _composed(line.entry, line.overrides, line.searched))
    if line.many:
        raise ValueError("--dry with -m: expected one study, or sweep=[KEY=A,B,C]")
    settings = compose(line.entry, line.overrides, line.searched)
    if not isinstance(settings, Study):
        return f"{line.entry}: the settings are valid"
    from spanlab.study.dry import describe_run

    return describe_run(settings, line.entry, HOME / settings.output.root)


def _first_job(line: CommandLine) -> object:
    """The settings of the first job of -m; its environment is that of all."""
    parsed = OverridesParser.create().parse_overrides(line.overrides)
    first = [next(one.sweep_string_iterator()) if one.is_sweep_override() else None for one in parsed]
    chosen = [
        word if value is None else f"{word.partition('=')[0]}={value}"
        for word, value in zip(line.overrides, first, strict=True)
    ]
    return compose(line.entry, chosen, line.searched)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: what `timeout`, Slurm and container hosts send before they kill."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """A user's mistake ends the program with one line; SPANLAB_TRACEBACK=1 asks for the whole story."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        code = 128 + (signal.SIGTERM if isinstance(interrupt, _Terminated) else signal.SIGINT)
        _leave("interrupted; what was finished is kept: the same command with output.if_exists=resume goes on", code)
    except Exception as mistake:  # what is no user's mistake is raised again
        if os.environ.get("SPANLAB_TRACEBACK") or not is_user_error(mistake):
            raise
        _leave(sentence(mistake, CONF), 1)


def _leave(words: str, code: int) -> NoReturn:
    print(f"spanlab: {words}", file=sys.stderr)
    sys.exit(code)


def compose(entry: str, overrides: list[str], searched: str | None = None) -> Any:
    """The settings object of an entry, as the command line would make it; `searched` is as Hydra's --config-dir."""
    return as_settings(_composed(entry, overrides, searched))


def _composed(entry: str, overrides: list[str], searched: str | None = None) -> DictConfig:
    register()
    own = [word for word in overrides if not word.lstrip("+~").startswith("hydra")]
    more = [f'hydra.searchpath=["file://{Path(searched).absolute()}"]'] if searched else []
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return hydra.compose(entry, own + more)


def as_settings(config: DictConfig) -> object:
    """A composed config as checked settings; below this there is no DictConfig."""
    load_plugins(OmegaConf.select(config, "plugins") or ())
    settings = OmegaConf.to_object(config)
    refuse_strangers(settings)
    return settings
