"""Models that are installed as Python packages: checks, and the tokenizer of a packaged model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.models.packaged import EMBEDDER, MODELS, PackagedModel, is_ready, packaged
from spanlab.workloads.source import WORKLOADS

if TYPE_CHECKING:
    from spanlab.settings.study import Study


def settle_packaged(study: Study) -> None:
    """Raise ValueError for an unknown packaged model, and set its tokenizer if the study names none."""
    engine, workload = study.engine, study.workload
    if engine.weights != "package":
        return
    key = "model" if engine.name is None else "engine.name"
    model = packaged(engine.name or study.model.name, f"engine.weights=package with {key}")
    if workload.tokenizer is None and WORKLOADS.takes(workload.reader, "tokenizer"):
        workload.tokenizer = model.name


def lacks_package(study: Study) -> bool:
    """Return whether the study reads a packaged model that is neither installed nor unpacked here."""
    return any(not (is_ready(model) or model.is_installed) for model in _packaged(study))


def _packaged(study: Study) -> list[PackagedModel]:
    questions = study.workload.questions
    dense = questions is not None and questions.retrieval == "dense"
    model_name = study.engine.name or study.model.name
    names = {study.workload.tokenizer, model_name if study.engine.weights == "package" else None}
    return [MODELS[name] for name in names if name in MODELS] + [EMBEDDER] * dense
