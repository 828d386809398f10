"""Settings of the points of a sweep, without composing every one of them from its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class PointComposer:
    """Composes an entry with further overrides, as the command line would.

    Overrides that set values are set in a copy of what the entry alone is composed to, as Hydra does it in the end.
    Those that choose files, add keys or remove them are composed anew; so are mistakes, which Hydra explains.

    `given`  overrides of the command line; those of keys that a point sets do not count
    `make`   checked settings of a composed config
    """

    def __init__(self, entry: str, given: Sequence[str], make: Callable[[DictConfig], Any]) -> None:
        self._entry, self._given, self._make = entry, given, make

    def __call__(self, *overrides: str) -> Any:
        """The settings with these overrides, each KEY=VALUE."""
        keys = tuple(f"{override.partition('=')[0]}=" for override in overrides)
        kept = [given for given in self._given if not given.startswith(keys)]
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if len(kept) == len(self._given) and all(map(_sets_value, parsed)):
            changed = self._changed(parsed)
            if changed is not None:
                return self._make(changed)
        return self._make(self._composed([*kept, *overrides]))

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        return hydra.compose(self._entry, [*overrides, "sweep=[]"])

    @cached_property
    def _own(self) -> DictConfig:
        return self._composed(self._given)

    def _changed(self, overrides: Sequence[Override]) -> DictConfig | None:
        """The entry's own config with other values; None where it does not take them."""
        config = deepcopy(self._own)
        try:
            for override in overrides:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return None
        return config


def _sets_value(override: Override) -> bool:
    """Whether an override changes a value that is there, and chooses no file of a group."""
    loader = GlobalHydra.instance().config_loader()
    plain = not (override.is_add() or override.is_force_add() or override.is_delete())
    return plain and not loader.get_group_options(override.key_or_group)
