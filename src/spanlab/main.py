"""The command line program: compose an entry of conf/ with Hydra, run it, and report user errors in one sentence."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from spanlab.cli.arguments import CommandLine, read
from spanlab.cli.describe import listing, usage
from spanlab.cli.environments import ensure_environment, start_in
from spanlab.compiled import CONF, HOME
from spanlab.errors import is_user_error, sentence, with_notes
from spanlab.plugins import load_plugins
from spanlab.settings import Compare, MakeShape, Schedule, Study, schemas
from spanlab.settings.composition import (
    as_settings,
    check_folder,
    compose_entry,
    explained,
    keep_booleans,
    schema_of,
    with_sections,
    without_sections,
)
from spanlab.settings.conformance import Conformance
from spanlab.settings.export import Export
from spanlab.settings.first_light import FirstLight
from spanlab.settings.models import register_models
from spanlab.settings.output import OutputSettings
from spanlab.settings.probe import HybridAnswers, TrainProbe
from spanlab.settings.tail_replay import TailReplay
from spanlab.study.output.folder import folder_name
from spanlab.study.output.provenance import commit
from spanlab.terminal import use_ascii_fallback

#: Further schemas by (config group, name): the command line does not complete the brackets of their lists.
_SCHEMAS: dict[tuple[str | None, str], type[Any]] = {
    (None, "base_train_probe"): TrainProbe,
    (None, "base_hybrid_answers"): HybridAnswers,
    (None, "base_tail_replay"): TailReplay,
    (None, "base_conformance"): Conformance,
    (None, "base_first_light"): FirstLight,
}


def register() -> None:
    """Register schemas, models and the resolver with Hydra; safe to call again."""
    OmegaConf.register_new_resolver("spanlab_root", lambda: str(HOME), replace=True)
    keep_booleans()
    register_models()
    _register_schemas()


@cache
def _register_schemas() -> None:
    """Register the schemas once per process, for converting all of them to config nodes is slow."""
    store = ConfigStore.instance()
    for (group, name), schema in (schemas() | _SCHEMAS).items():
        store.store(name=name, node=schema, group=group)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="smoke")
def _entry(config: DictConfig) -> None:
    with _in_one_sentence():
        settings = as_settings(config)
        if HydraConfig.get().mode == RunMode.RUN:  # jobs of -m run in processes that cannot restart
            ensure_environment(settings)
        _run_entry(settings)


def _run_entry(settings: object) -> None:
    """Run an entry by the type of its settings; each type imports its program on first use."""
    passed = True
    match settings:
        case Study():
            run, hydra_run = _run_name(settings.output), HydraConfig.get()
            settings.output.run = run
            run_settings(settings, str(hydra_run.job.config_name), hydra_run.overrides.task)
        case MakeShape():
            from spanlab.workloads import make_shape

            print(make_shape(**vars(settings)))
        case Schedule():
            from spanlab.schedule.run import run_schedule

            run_schedule(settings)
        case Compare():
            from spanlab.study.entries.compare_runs import run_compare

            run_compare(settings, _run_name(settings.output), HOME / settings.output.root)
        case Export():
            from spanlab.study.entries.export import run_export

            print(run_export(settings, HOME / "outputs"))
        case TrainProbe():
            from spanlab.study.entries.train_probe import run_train_probe

            run_train_probe(settings, _run_name(settings.output), HOME / settings.output.root)
        case HybridAnswers():
            from spanlab.study.entries.hybrid_answers import run_hybrid_answers

            run_hybrid_answers(settings, _run_name(settings.output), HOME / settings.output.root)
        case TailReplay():
            from spanlab.study.entries.tail_replay import run_tail_replay

            run_tail_replay(settings, _run_name(settings.output), HOME / settings.output.root)
        case Conformance():
            from spanlab.study.conformance.run import run_conformance

            passed = run_conformance(settings, _run_name(settings.output), HOME / settings.output.root)
        case FirstLight():
            from spanlab.study.entries.first_light import run_first_light

            passed = run_first_light(settings, HOME)
        case _:
            raise TypeError(f"{type(settings).__name__}: no entry has these settings")
    if not passed:
        sys.exit(1)


def run_settings(study: Study, entry: str, overrides: Sequence[str], show: bool = True) -> Path:
    """Run a study or a sweep, and return its folder; Hydra has to be initialized, for the points of a sweep.

    `overrides`  overrides of the command line, which the points of a sweep have too
    `show`       print the tables of a study
    """
    from spanlab.study.run import run_study
    from spanlab.study.sweep.compose_points import PointComposer
    from spanlab.study.sweep.run import run_sweep

    root = HOME / study.output.root  # an absolute root replaces HOME
    if study.sweep:
        return run_sweep(study, entry, root, PointComposer(entry, overrides, as_settings))
    return run_study(study, entry, root, show)


def _run_name(output: OutputSettings, hydra_run: Any = None) -> str:
    """Return the name of the run folder: the chosen name, or the entry with its overrides.

    Other settings thus never replace this run. With `-m` a chosen name gets the overrides too, for all jobs share it.
    """
    hydra_run = hydra_run or HydraConfig.get()
    if output.run and hydra_run.mode != RunMode.MULTIRUN:
        return output.run
    name = output.run or str(hydra_run.job.config_name)
    return folder_name(",".join(filter(None, (name, without_sections(hydra_run.job.override_dirname)))))


def main() -> None:
    """Run the console script; exit code 0, 1 after a user error, 130 after Ctrl-C, 143 after SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    use_ascii_fallback()
    logging.raiseExceptions = False  # a log that cannot be written, such as wandb's on a full disk, is no error
    with _in_one_sentence():
        register()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
        line = read(sys.argv[1:])
        if line.asks:
            print(_answer(line))
            return
        if line.many:
            ensure_environment(_first_job(line))
        if line.searched:
            check_folder(line.searched)
        sys.argv[1:] = with_sections(line.arguments)
        try:
            with explained(line.entry, line.overrides, line.searched):
                _entry()
        except MissingConfigException as missing:  # a launcher that only another environment has
            if "submitit" in str(missing):
                start_in("cluster")
            raise


def _answer(line: CommandLine) -> str:
    """Return the text of an option that starts no run: --version, --list, --help or --dry."""
    if line.asks == "version":
        return f"spanlab {importlib.metadata.version('spanlab')}, commit {commit()}"
    if line.asks == "list" and line.kind == "arms" and "-cn" in line.arguments:
        return "\n".join(compose(line.entry, line.overrides, line.searched).arms)
    if line.asks == "list":
        load_plugins(_composed(line.entry, line.overrides, line.searched).get("plugins") or ())
        return listing(line.kind)
    if line.asks == "help":
        return usage(line.entry, _composed(line.entry, line.overrides, line.searched))
    if line.many:
        raise ValueError("--dry with -m: expected one study, or sweep=[KEY=A,B,C]")
    return _dry(line)


def _dry(line: CommandLine) -> str:
    """Check all that a run checks before it starts, and return a description of the run."""
    from spanlab.study.dry import check_entry, describe_run
    from spanlab.study.sweep.compose_points import PointComposer

    config = _composed(line.entry, line.overrides, line.searched, return_hydra_config=True)
    hydra_run = config.hydra
    with open_dict(config):
        del config["hydra"]
    settings = as_settings(config)
    output = getattr(settings, "output", OutputSettings())
    output.run, root = _run_name(output, hydra_run), HOME / output.root
    if not isinstance(settings, Study):
        return check_entry(settings, line.entry, output.run, root)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return describe_run(settings, line.entry, root, PointComposer(line.entry, line.overrides, as_settings))


def _first_job(line: CommandLine) -> object:
    """Return the settings of the first job of -m, whose environment all jobs use."""
    parsed = OverridesParser.create().parse_overrides(line.overrides)
    first = [next(item.sweep_string_iterator()) if item.is_sweep_override() else None for item in parsed]
    chosen = [
        word if value is None else f"{word.partition('=')[0]}={value}"
        for word, value in zip(line.overrides, first, strict=True)
    ]
    return compose(line.entry, chosen, line.searched)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which `timeout`, Slurm and container hosts send before they kill a process."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Exit with one line after a user error; SPANLAB_TRACEBACK=1 raises it instead."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        code = 128 + (signal.SIGTERM if isinstance(interrupt, _Terminated) else signal.SIGINT)
        text = "interrupted; what was finished is kept: the same command with output.if_exists=resume goes on"
        _exit(with_notes(text, interrupt), code)
    except Exception as mistake:  # all but user errors are raised again
        if os.environ.get("SPANLAB_TRACEBACK") or not is_user_error(mistake):
            raise
        _exit(sentence(mistake), 1)


def _exit(message: str, code: int) -> NoReturn:
    print(f"spanlab: {message}", file=sys.stderr)
    sys.exit(code)


def compose(entry: str, overrides: list[str], searched: str | None = None) -> Any:
    """Compose the settings of an entry as the command line does; `searched` is Hydra's --config-dir."""
    return as_settings(_composed(entry, overrides, searched))


def _composed(entry: str, overrides: list[str], searched: str | None = None, **options: Any) -> DictConfig:
    register()
    keys = overrides if options else [word for word in overrides if not word.lstrip("+~").startswith("hydra")]
    if searched:
        check_folder(searched)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose_entry(entry, keys, searched, **options)
    schema_of(config)
    return config
