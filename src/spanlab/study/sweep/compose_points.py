"""Settings of the points of a sweep, without a full Hydra composition for every point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from spanlab.settings.composition import compose_entry, with_sections


class PointComposer:
    """Composes an entry with further overrides, as the command line does.

    Overrides that set values are applied to a copy of the composed entry, as in Hydra's last step. Overrides that
    choose files, add keys or remove keys need a full composition. So do invalid overrides, for Hydra's error message.

    `overrides`  overrides of the command line; a point's override of the same key replaces them
    `make`       function that converts a composed config to checked settings
    """

    def __init__(self, entry: str, overrides: Sequence[str], make: Callable[[DictConfig], Any]) -> None:
        self._entry, self._overrides, self._make = entry, overrides, make

    def __call__(self, *point_overrides: str) -> Any:
        """Return the settings with these overrides, each KEY=VALUE."""
        keys = tuple(f"{override.partition('=')[0]}=" for override in point_overrides)
        remaining = [override for override in self._overrides if not override.startswith(keys)]
        parsed = OverridesParser.create().parse_overrides(with_sections(point_overrides))
        if len(remaining) == len(self._overrides) and all(map(_sets_value, parsed)):
            changed = self._with_values(parsed)
            if changed is not None:
                return self._make(changed)
        return self._make(self._compose([*remaining, *point_overrides]))

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        return compose_entry(self._entry, [*overrides, "sweep=[]"])

    @cached_property
    def _base_config(self) -> DictConfig:
        return self._compose(self._overrides)

    def _with_values(self, overrides: Sequence[Override]) -> DictConfig | None:
        """Return the entry's config with these values; None where OmegaConf rejects them."""
        config = deepcopy(self._base_config)
        try:
            for override in overrides:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except Exception:  # of any type: the full composition says what is wrong
            return None
        return config


def _sets_value(override: Override) -> bool:
    """Whether an override changes an existing value and does not choose a file of a group."""
    loader = GlobalHydra.instance().config_loader()
    plain = not (override.is_add() or override.is_force_add() or override.is_delete())
    return plain and not loader.get_group_options(override.key_or_group)
