"""Tracking by wandb: offline unless the user is logged in; a failure never fails the study."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from spanlab.errors import warn
from spanlab.settings.server import TrackingSettings


class Tracker:
    """A wandb run, or none; a failure stops the tracking with a warning."""

    def __init__(self, run: Any = None) -> None:
        self._run = run

    def summary(self, values: dict[str, Any]) -> None:
        """Set the run's summary."""
        self._try(lambda run: run.summary.update(values))

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Log a table."""

        def log(run: Any) -> None:
            import wandb

            run.log({name: wandb.Table(columns=[*columns], data=rows)})

        self._try(log)

    def figures(self, paths: list[Path]) -> None:
        """Log figures under their file names."""

        def log(run: Any) -> None:
            import wandb

            run.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in paths})

        self._try(log)

    def _try(self, log: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            log(self._run)
        except Exception as error:  # any error of a tracker: the results are already written
            _stopped(error)
            self._run = None


def _stopped(error: Exception) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    warn(f"tracking.kind=wandb stopped, the study goes on: {reason}")


def check_login(settings: TrackingSettings) -> None:
    """Raise ValueError for online tracking without a login, before the study starts."""
    if (settings.kind, settings.mode) != ("wandb", "online"):
        return
    import wandb

    if not wandb.login(prompt=False):
        raise ValueError(
            "tracking.mode=online: expected `wandb login` first, or tracking.mode=offline, or tracking=none"
        )


@contextmanager
def tracked(
    settings: TrackingSettings, name: str, group: str, config: dict[str, Any], folder: Path
) -> Iterator[Tracker]:
    """Yield a tracker; its wandb run is closed as failed if the block raises."""
    check_login(settings)
    run = _start(settings, name, group, config, folder) if settings.kind == "wandb" else None
    try:
        yield Tracker(run)
    except BaseException:
        if run is not None:
            run.finish(exit_code=1)
        raise
    if run is None:
        return
    try:
        run.finish()
    except Exception as error:  # the study is complete, only its tracked copy is not
        _stopped(error)


def _start(
    settings: TrackingSettings, name: str, group: str, config: dict[str, Any], folder: Path
) -> Any:
    """Start a wandb run; None if that fails."""
    try:
        import wandb

        # auto is online only after an earlier login, and never prompts
        logged_in = settings.mode == "auto" and wandb.login(prompt=False)
        mode: Literal["online", "offline"] = (
            "online" if settings.mode == "online" or logged_in else "offline"
        )
        # no output, and no sampling of the machine, which would disturb measurements
        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=settings.project,
            name=name,
            group=group,
            config=config,
            dir=folder,
            mode=mode,
            settings=quiet,
        )
    except Exception as error:  # any error of a tracker: the study runs without it
        _stopped(error)
        return None
