"""The Hydra face: entries of conf/ become settings, settings become runs, mistakes become one sentence."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from spanlab.mistakes import is_mistake, sentence
from spanlab.plugins import load_plugins
from spanlab.settings import Compare, MakeShape, Schedule, Study, refuse_strangers, schemas
from spanlab.study.folder import folder_name
from spanlab.terminal import use_twins

HOME = Path(__file__).resolve().parents[2]
CONF = HOME / "conf"


def register() -> None:
    """Make schemas and the resolver known to Hydra; safe to call again."""
    OmegaConf.register_new_resolver("spanlab_root", lambda: str(HOME), replace=True)
    store = ConfigStore.instance()
    for (group, name), schema in schemas().items():
        store.store(name=name, node=schema, group=group)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="smoke")
def _entry(config: DictConfig) -> None:
    with _in_one_sentence():
        settings = as_settings(config)
        if isinstance(settings, MakeShape):
            _make_shape(settings)
        elif isinstance(settings, Schedule):
            _schedule(settings)
        elif isinstance(settings, Compare):
            _compare(settings)
        else:
            assert isinstance(settings, Study), "every other entry is a study"
            _run_any_study(settings)


def _make_shape(settings: MakeShape) -> None:
    from spanlab.workloads import make_shape

    print(make_shape(**vars(settings)))


def _run_any_study(settings: Study) -> None:
    if settings.sweep:
        _run_sweep(settings)
    else:
        _run_study(settings)


def _schedule(settings: Schedule) -> None:
    from spanlab.schedule.run import run_schedule

    run_schedule(settings)


def _compare(settings: Compare) -> None:
    from spanlab.study.compare_runs import run_compare

    run_compare(settings, _run_name("compare", settings.output.run), HOME / settings.output.root)


def _run_study(settings: Study) -> None:
    from spanlab.study.run import run_study

    entry = str(HydraConfig.get().job.config_name)
    settings.output.run = _run_name(entry, settings.output.run)
    run_study(settings, entry, HOME / settings.output.root)  # an absolute root replaces HOME


def _run_sweep(settings: Study) -> None:
    from spanlab.study.sweep import Entry, run_sweep

    name = str(HydraConfig.get().job.config_name)
    settings.output.run = _run_name(name, settings.output.run)
    entry = Entry(name, partial(_compose_point, name), partial(sentence, conf=CONF))
    run_sweep(settings, entry, HOME / settings.output.root)


def _compose_point(entry: str, override: str) -> Any:
    """The entry as the command line set it, but for one setting of a sweep."""
    key = override.partition("=")[0]
    kept = [given for given in HydraConfig.get().overrides.task if not given.startswith(f"{key}=")]
    return as_settings(hydra.compose(entry, [*kept, override, "sweep=[]"]))


def _run_name(entry: str, given: str) -> str:
    """The entry and what was set on the command line, so that other settings never replace this run.

    A given name alone would be that of every job of `-m`.
    """
    hydra_run = HydraConfig.get()
    if given and hydra_run.mode != RunMode.MULTIRUN:
        return given
    return folder_name(",".join(filter(None, (given or entry, hydra_run.job.override_dirname))))


def main() -> None:
    """The console script: exit code 0, 1 for a mistake said in one sentence, 130 for Ctrl-C."""
    use_twins()
    logging.raiseExceptions = False  # a log that cannot be written, such as wandb's on a full disk, is no news
    with _in_one_sentence():
        register()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of saying them in many lines
        _entry()


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """A user's mistake ends the program with one line; SPANLAB_TRACEBACK=1 asks for the whole story."""
    try:
        yield
    except KeyboardInterrupt:
        _leave("interrupted; what was finished is kept: the same command with output.if_exists=resume goes on", 130)
    except Exception as mistake:  # what is no user's mistake is raised again
        if os.environ.get("SPANLAB_TRACEBACK") or not is_mistake(mistake):
            raise
        _leave(sentence(mistake, CONF), 1)


def _leave(words: str, code: int) -> NoReturn:
    print(f"spanlab: {words}", file=sys.stderr)
    sys.exit(code)


def compose(entry: str, overrides: list[str]) -> Any:
    """The settings object of an entry, as the command line would make it."""
    register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return as_settings(hydra.compose(entry, overrides))


def as_settings(config: DictConfig) -> object:
    """A composed config as checked settings; below this there is no DictConfig."""
    load_plugins(OmegaConf.select(config, "plugins") or ())
    settings = OmegaConf.to_object(config)
    refuse_strangers(settings)
    return settings
