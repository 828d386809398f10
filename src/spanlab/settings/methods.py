"""Settings of the analysis `methods`: its reference arms and its noise floor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from spanlab.checks import one_of, positive

if TYPE_CHECKING:
    from spanlab.settings.study import Study

METHODS = "methods"


@dataclass
class MethodSettings:
    """Reference arms with other passages in their prompts, and the noise of the baseline; for the analysis methods.

    `without_context`  arm without passages, whose loss is the zero point of the benefit of the context; null: shares
                       of the benefit are not reported
    `gold_only`        arm with the gold passage only, as perfect retrieval would give; null: none
    `floor_tokens`     most prompt tokens of a step in the baseline's second run; its distance from the first run is
                       the floor of all distances
    """

    without_context: str | None = None
    gold_only: str | None = None
    floor_tokens: int = 128

    def __post_init__(self) -> None:
        positive("methods.floor_tokens", self.floor_tokens)


def check_methods(study: Study) -> None:
    """Raise ValueError for arms that do not run, and for a study that records neither scores nor answers."""
    settings = study.methods
    if METHODS not in study.chosen_analyses():
        _refuse_unread(settings, study.chosen_analyses())
        return
    for key in ("without_context", "gold_only"):
        arm = getattr(settings, key)
        if arm is not None:
            one_of(f"methods.{key}", arm, study.arms)
    if study.engine.record not in ("scores", "tokens"):
        raise ValueError(f"analyses=methods with engine.record={study.engine.record}: expected scores or tokens")
    if study.engine.record == "tokens" and (study.engine.teacher or study.engine.weights == "random"):
        answers = f"engine.teacher={study.engine.teacher}, engine.weights={study.engine.weights}"
        raise ValueError(f"engine.record=tokens with {answers}: expected engine.teacher=null and trained weights")
    if study.baseline not in study.chosen():
        raise ValueError(f"baseline={study.baseline} with analyses=methods: expected one of the arms that run")
    if study.arrivals.clients != 1:
        clients = f"arrivals.clients={study.arrivals.clients}"
        raise ValueError(f"analyses=methods with {clients}: expected arrivals=closed_loop with 1")
    if settings.floor_tokens >= study.batch.max_num_batched_tokens:
        most = f"batch.max_num_batched_tokens={study.batch.max_num_batched_tokens}"
        raise ValueError(f"methods.floor_tokens={settings.floor_tokens} with {most}: expected fewer")


def _refuse_unread(settings: MethodSettings, analyses: list[str]) -> None:
    """Raise ValueError for settings that no analysis reads."""
    usual = asdict(MethodSettings())
    for key, value in asdict(settings).items():
        if value != usual[key]:
            raise ValueError(f"methods.{key}={value} with analyses={analyses}: expected methods among them")
