"""Checks of arms that choose or reorder passages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spanlab.settings.study import Study


def check_passages(study: Study) -> None:
    """Raise ValueError for `passages` of an arm on several replicas, on tiers or on a real server."""
    for name in study.chosen():
        passages = study.arms[name].passages
        if passages.are_default:
            continue
        chosen = f"arms.{name}.passages.order={passages.order}, view={passages.view}"
        if study.backend == "server":
            raise ValueError(f"{chosen} with backend=server: expected given and all, or backend=sim")
        if study.replicas.count > 1:
            raise ValueError(f"{chosen} with replicas.count={study.replicas.count}: expected given and all")
        if study.store.tiers:
            raise ValueError(f"{chosen} with store.tiers: expected given and all")
