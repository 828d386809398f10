"""Models that packages hold: which of them a study needs, and the tokenizer that goes with one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.models.packaged import EMBEDDER, MODELS, PackagedModel, is_ready, packaged
from spanlab.workloads.source import WORKLOADS

if TYPE_CHECKING:
    from spanlab.settings.study import Study


def settle_packaged(study: Study) -> None:
    """Refuse a packaged model that there is not, and give text its tokenizer where the study names none."""
    engine, workload = study.engine, study.workload
    if engine.weights != "package":
        return
    key = "model" if engine.name is None else "engine.name"
    model = packaged(engine.name or study.model.name, f"engine.weights=package with {key}")
    if workload.tokenizer is None and WORKLOADS.takes(workload.reader, "tokenizer"):
        workload.tokenizer = model.name


def lacks_package(study: Study) -> bool:
    """Whether the study reads a packaged model that this environment neither holds nor has made ready before."""
    return any(not (is_ready(model) or model.is_installed) for model in _packaged(study))


def _packaged(study: Study) -> list[PackagedModel]:
    questions = study.workload.questions
    dense = questions is not None and questions.retrieval == "dense"
    own = study.engine.name or study.model.name
    names = {study.workload.tokenizer, own if study.engine.weights == "package" else None}
    return [MODELS[name] for name in names if name in MODELS] + [EMBEDDER] * dense
