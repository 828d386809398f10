"""Settings that tests compose often: an entry with its choices of files is composed once, values are set in copies."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from spanlab import api, cli
from spanlab.compiled import CONF
from spanlab.settings.composition import check_paths, compose_entry, full_words, with_sections
from spanlab.study import sweep


class Compositions:
    """Composed entries by their overrides, those that set existing values left out."""

    def __init__(self) -> None:
        self.composed: dict[tuple[str, ...], bytes] = {}
        self.groups: dict[str, bool] = {}  # by key: asking Hydra copies its whole store

    def __call__(self, entry: str, overrides: Sequence[str], searched: str | None = None, **options: Any) -> DictConfig:
        """As `compose_entry`, which composes whatever is new, reads other folders, or is wrong."""
        if searched or options or not _reads_ours_alone():
            return compose_entry(entry, overrides, searched, **options)
        try:
            parsed = OverridesParser.create().parse_overrides(with_sections(full_words(entry, overrides)))
            values = [override for override in parsed if self._sets_value(override)]
            key = (entry, *(str(override.input_line) for override in parsed if override not in values))
            if key not in self.composed:
                self.composed[key] = pickle.dumps(compose_entry(entry, key[1:]))
            config = pickle.loads(self.composed[key])
            for override in values:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
            check_paths(overrides, config)
        except Exception:  # of any kind: the whole composition says what is wrong
            return compose_entry(entry, overrides)
        return config

    def _sets_value(self, override: Override) -> bool:
        key = override.key_or_group
        if key not in self.groups:
            self.groups[key] = bool(GlobalHydra.instance().config_loader().get_group_options(key))
        return not (override.is_add() or override.is_force_add() or override.is_delete() or self.groups[key])


def _reads_ours_alone() -> bool:
    sources = GlobalHydra.instance().config_loader().get_sources()
    return [source.path for source in sources if source.scheme() == "file"] == [str(CONF)]


@contextmanager
def composing(compositions: Compositions) -> Iterator[None]:
    """Let the command line, the Python API and points of sweeps take entries from here while this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cli, api, sweep):
            patch.setattr(module, "compose_entry", compositions)
        yield
