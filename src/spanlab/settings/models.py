"""The group `model` for Hydra: its choices are config.json files, wherever they lie, and become sizes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from spanlab.models.find import choices, find_spec, names_file

_GROUP = "model/"


class ModelSource(ConfigSource):
    """Answers for `model=NAME` before the files of conf/ do, which hold the keys of a config.json and no sizes.

    What is no choice of ours and names no file is left to the other sources: a folder given with --config-dir.
    """

    @staticmethod
    def scheme() -> str:
        """What the search path names this source by."""
        return "model"

    def available(self) -> bool:
        """It needs nothing."""
        return True

    def is_group(self, config_path: str) -> bool:
        """That there is a group `model` is said by the folder."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Whether a path is a choice of `model` that can be looked for here."""
        where = config_path.removeprefix(_GROUP)
        return where != config_path and (where in choices() or names_file(where))

    def load_config(self, config_path: str) -> ConfigResult:
        """The sizes of a model."""
        sizes: Any = OmegaConf.create(asdict(find_spec(config_path.removeprefix(_GROUP))))
        return ConfigResult(provider=self.provider, path=self.full_path(), config=sizes, header={"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The folder lists its files."""
        return []


class _Models(SearchPathPlugin):
    """Puts the source in front of the folder of conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the source."""
        search_path.prepend(provider="spanlab", path=f"{ModelSource.scheme()}://")


def register_models() -> None:
    """Make the source known to Hydra; safe to call again."""
    for plugin in (ModelSource, _Models):
        Plugins.instance().register(plugin)
