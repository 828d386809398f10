"""A memo of Hydra's composition: files of conf/ are read once, and merged once per choice of groups, not per test."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from spanlab.settings.entries import choices_without_file

CONF = Path(__file__).parents[2] / "conf"


@dataclass(frozen=True)
class Steps:
    """The steps of a composition.

    `create`   the list of files for an entry
    `merge`    the merging of such a list
    `load`     the reading of a file
    `choices`  what names of files with ${...} in them are resolved by, for one file's defaults
    """

    create: Callable[..., DefaultsList]
    merge: Callable[..., DictConfig]
    load: Callable[..., ConfigResult | None]
    choices: Callable[..., DictConfig | None]


def _installed() -> Steps:
    merge, load = ConfigLoaderImpl._compose_config_from_defaults_list, ConfigRepository.load_config
    return Steps(config_loader_impl.create_defaults_list, merge, load, defaults_list._create_interpolation_map)


#: Hydra's own
HYDRA = _installed()


@dataclass
class Merged:
    """Files that were merged in this order; `config` is what came of them, where another list may go on from it."""

    config: bytes | None = None
    followed_by: dict[str, Merged] = field(default_factory=dict)


class Compositions:
    """Defaults lists by entry and choices of groups, what their files say, and what their merging came to.

    A list that begins as another one did is merged from where they part.
    """

    def __init__(self) -> None:
        self.reused, self.continued = 0, 0
        self._lists: dict[Any, DefaultsList] = {}
        self._known: dict[int, list[ResultDefault]] = {}  # by identity, which `_lists` keeps
        self._files: dict[str, bytes] = {}
        self._merged = Merged()

    @property
    def steps(self) -> Steps:
        """Hydra's steps with this memo."""
        methods = (  # of Hydra's classes: plain functions become methods
            lambda *given, **named: self.merge(*given, **named),
            lambda *given, **named: self.load(*given, **named),
        )
        return Steps(self.create, *methods, _choices)

    def create(
        self, repo: Any, config_name: str, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
    ) -> DefaultsList:
        """As Hydra's `create_defaults_list`."""
        given = Overrides(repo=repo, overrides_list=overrides_list)
        key = _key(repo, given, config_name, prepend_hydra, skip_missing)
        if key in self._lists:
            return replace(self._lists[key], config_overrides=given.config_overrides)
        made = HYDRA.create(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        if key is not None:
            self._lists[key] = made
            self._known[id(made.defaults)] = made.defaults
        return made

    def merge(self, loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        """As Hydra's `_compose_config_from_defaults_list`."""
        if id(defaults) not in self._known:
            return HYDRA.merge(loader, defaults, repo)
        try:
            config = self._go_on(loader, defaults, repo)
        except OmegaConfBaseException:
            return HYDRA.merge(loader, defaults, repo)  # which says where
        _strip_defaults(config)
        return config

    def _go_on(self, loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        """Merge the files that no earlier list had after the same files."""
        path = self._path(defaults)
        start = max((at for at, merged in enumerate(path) if merged.config is not None), default=0)
        known = path[start].config
        config = OmegaConf.create() if known is None else pickle.loads(known)
        self.reused += start == len(defaults)
        self.continued += 0 < start < len(defaults)
        parting, merged = len(path) - 1, path[start]
        with flag_override(config, "no_deepcopy_set_nodes", True):
            for at, default in enumerate(defaults[start:], start + 1):
                config.merge_with(loader._load_single_config(default=default, repo=repo).config)
                merged = merged.followed_by.setdefault(repr(default), Merged())
                if at in (parting, len(defaults)):
                    merged.config = pickle.dumps(config)
        return config

    def _path(self, defaults: Sequence[ResultDefault]) -> list[Merged]:
        """The merged first files, as far as an earlier list began with the same."""
        path = [self._merged]
        for default in defaults:
            following = path[-1].followed_by.get(repr(default))
            if following is None:
                break
            path.append(following)
        return path

    def load(self, repo: ConfigRepository, config_path: str) -> ConfigResult | None:
        """As Hydra's `ConfigRepository.load_config`; files of other folders may change."""
        if not (_reads_ours_alone(repo) and (CONF / f"{config_path}.yaml").is_file()):
            return HYDRA.load(repo, config_path)
        if config_path not in self._files:
            self._files[config_path] = pickle.dumps(HYDRA.load(repo, config_path))
        return pickle.loads(self._files[config_path])


def _choices(overrides: Overrides, defaults: list[InputDefault], self_added: bool) -> DictConfig | None:
    """As Hydra's `_create_interpolation_map`, but only where one of the names is resolved by it."""
    if any(default.is_interpolation() for default in defaults if not default.is_self()):
        return HYDRA.choices(overrides, defaults, self_added)
    return None


def _strip_defaults(config: Any) -> None:
    """Drop lists of defaults that merged files leave behind, as Hydra does at the end."""
    if not isinstance(config, DictConfig) or config._is_missing() or config._is_none():
        return
    with flag_override(config, ["readonly", "struct"], False):
        if config._get_flag("HYDRA_REMOVE_TOP_LEVEL_DEFAULTS"):
            config._set_flag("HYDRA_REMOVE_TOP_LEVEL_DEFAULTS", None)
            config.pop("defaults", None)
        for _, value in config.items_ex(resolve=False):
            _strip_defaults(value)


@contextmanager
def composing(steps: Steps) -> Iterator[None]:
    """Let Hydra compose with these steps while this lasts."""
    before = _installed()
    try:
        _install(steps)
        yield
    finally:
        _install(before)


def _install(steps: Steps) -> None:
    config_loader_impl.create_defaults_list = steps.create
    ConfigLoaderImpl._compose_config_from_defaults_list = steps.merge
    ConfigRepository.load_config = steps.load
    defaults_list._create_interpolation_map = steps.choices


def _key(repo: Any, given: Overrides, *more: object) -> tuple[Any, ...] | None:
    """Dependencies of the merged files; None if a test can change one of them."""
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
    names = value if isinstance(value, list) else [value]
    return all((CONF / group / f"{name}.yaml").is_file() or (group, name) in choices_without_file() for name in names)
