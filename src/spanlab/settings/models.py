"""Hydra config source of the group `model`: it converts a Hugging Face config.json to a ModelSpec."""

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
    """Resolve `model=NAME`, `model=FILE`, `model=FOLDER` and hub names before Hydra reads the files of conf/.

    Those files hold the keys of a config.json. Other names are left to the next source, such as --config-dir.
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
        return ConfigResult(provider=self.provider, path=self.full_path(), config=sizes, header={"package": None})

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
