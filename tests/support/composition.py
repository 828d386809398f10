"""A memo of Hydra's composition: files of conf/ are merged once per choice of groups, not once per test."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides
from omegaconf import DictConfig

CONF = Path(__file__).parents[2] / "conf"


#: Hydra's own list of files for an entry, and its merging of such a list
HYDRA = (config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list)


class Compositions:
    """Defaults lists by entry and choices of groups, and the config of each before its values are overridden."""

    def __init__(self) -> None:
        self.reused = 0
        self._lists: dict[Any, DefaultsList] = {}
        self._configs: dict[int, bytes] = {}  # by the identity of a list's defaults, which `_lists` keeps

    def create(
        self, repo: Any, config_name: str, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
    ) -> DefaultsList:
        """As Hydra's `create_defaults_list`."""
        given = Overrides(repo=repo, overrides_list=overrides_list)
        key = _key(repo, given, config_name, prepend_hydra, skip_missing)
        if key in self._lists:
            return replace(self._lists[key], config_overrides=given.config_overrides)
        made = HYDRA[0](repo, config_name, overrides_list, prepend_hydra, skip_missing)
        if key is not None:
            self._lists[key] = made
        return made

    def merge(self, loader: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> DictConfig:
        """As Hydra's `_compose_config_from_defaults_list`."""
        known = self._configs.get(id(defaults))
        if known is not None:
            self.reused += 1
            return pickle.loads(known)
        config = HYDRA[1](loader, defaults, repo)
        if any(made.defaults is defaults for made in self._lists.values()):
            self._configs[id(defaults)] = pickle.dumps(config)
        return config


@contextmanager
def composing(create: Callable[..., DefaultsList], merge: Callable[..., DictConfig]) -> Iterator[None]:
    """Let Hydra compose with these two while this lasts."""
    before = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    try:
        _install(create, lambda *given, **named: merge(*given, **named))  # a plain function becomes a method
        yield
    finally:
        _install(*before)


def _install(create: Callable[..., DefaultsList], merge: Callable[..., DictConfig]) -> None:
    config_loader_impl.create_defaults_list = create
    ConfigLoaderImpl._compose_config_from_defaults_list = merge


def _key(repo: Any, given: Overrides, *more: object) -> tuple[Any, ...] | None:
    """What the merged files depend on; None where a file that a test may change is among them."""
    added = [(default.group, default.package, default.value) for default in given.append_group_defaults]
    chosen = [*given.override_choices.items(), *((group, value) for group, _, value in added)]
    if not (_reads_ours_alone(repo) and all(_is_choice(*choice) for choice in chosen)):
        return None
    deleted = [(key, deletion.name) for key, deletion in given.deletions.items()]
    return (repr(chosen), repr(added), repr(deleted), *more)


def _reads_ours_alone(repo: Any) -> bool:
    folders = [source.path for source in repo.get_sources() if source.scheme() == "file"]
    return folders == [str(CONF)]


def _is_choice(key: str, value: Any) -> bool:
    group = key.partition("@")[0]
    return all((CONF / group / f"{name}.yaml").is_file() for name in (value if isinstance(value, list) else [value]))
