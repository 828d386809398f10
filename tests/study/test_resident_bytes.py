"""Resident bytes over time do not depend on whether equal decode steps pass as one."""

from pathlib import Path
from typing import Any

import pytest

from spanlab.cli import compose
from spanlab.study.numbers import ArmFiles
from spanlab.study.run import run_study
from spanlab_sim.run import ModelledBackend

from .conftest import NO_LOAD

SHORT = ("executor.kind=here", "seeds=[0]", *NO_LOAD, "output.figures=false", "output.run=x", "tracking.kind=none")
HYBRID = ("quality_sim", "workload.documents=6", "workload.questions_per_document=4", "store.total_gib=3")
PASSAGES = ("pic_sim", "workload.rag.requests=80", "store.total_gib=2")
CASES = [
    (*PASSAGES, "arms=presets"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            (*PASSAGES, "arms=pic"),
            (*PASSAGES, "arms=evictions"),
            (*HYBRID, "arms=own_rules"),
            (*HYBRID, "arms=presets_hybrid"),
            ("replicas_sim", "workload.chat_sessions.sessions=20", "sweep=[]"),
        )
    ),
]


def runs_of(case: tuple[str, ...], root: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of the finished runs of every arm."""
    entry, *overrides = case
    study = compose(entry, [*SHORT, *overrides, "analyses=[summary]"])
    folder = run_study(study, entry, root, show=False)
    return {arm: ArmFiles.of_arm(folder, arm).finished() for arm in study.chosen()}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_jumps_are_those_of_single_steps(tmp_path: Path, monkeypatch, case: tuple[str, ...]):
    jumped = runs_of(case, tmp_path / "jumped")
    begin = ModelledBackend.__init__

    def stepping(backend: ModelledBackend, *args: Any, **options: Any) -> None:
        begin(backend, *args, **options)
        backend._jump = False

    monkeypatch.setattr(ModelledBackend, "__init__", stepping)
    stepped = runs_of(case, tmp_path / "stepped")
    keys = [f"{kind}_resident_{value}_bytes" for kind in ("kv", "state") for value in ("mean", "peak")]
    for arm, rows in stepped.items():
        for row, other in zip(rows, jumped[arm], strict=True):
            assert {key: row[key] for key in keys} == {key: other[key] for key in keys}, arm
