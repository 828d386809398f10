"""A study on the engine reports the simulator's error, and first makes a profile if there is none."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from spanlab.cli import compose
from spanlab.study.run import run_study

SMALL = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "workload.rag.requests=null",
    "workload.rag.k=2",
    "workload.rag.passage_tokens=64",
    "workload.output_tokens=3",
    "only=[none,pic]",
    "seeds=[0,1]",
    "design.shapes=2",
    "design.repeats=1",
    "arrivals.rate_rps=20",
    "engine.threads=1",
    "tracking.kind=none",
    "output.figures=false",
)


def run(root: Path, *overrides: str) -> dict:
    study = compose("pic_clean", [*SMALL, f"output.root={root}", *overrides])
    return json.loads((run_study(study, "pic_clean", root) / "summary.json").read_bytes())


def test_a_study_makes_a_missing_profile_for_the_next(tmp_path: Path, capfd):
    run(tmp_path, "seeds=[0]", "workload.rag.k=1")
    said = capfd.readouterr().err
    assert "no profile of tiny on this machine" in said
    assert "kept for the simulator" in said
    (path,) = (tmp_path / "profiles").iterdir()
    first = json.loads(path.read_bytes())["longest"]
    summary = run(tmp_path)  # whose prompts are longer
    second = json.loads(path.read_bytes())["longest"]
    assert second > first
    captured = capfd.readouterr()
    assert f"covers {second:,} tokens (the stored one covers {first:,})" in captured.err
    assert "schedule match" in " ".join(captured.out.split())
    before = path.stat().st_mtime_ns
    fidelity = summary["fidelity"]
    assert fidelity["profile"]["model"] == "tiny"
    assert list(summary["arms"]) == ["none", "pic"]
    for cell, arm in zip(fidelity["cells"], ("none", "pic"), strict=True):
        assert (cell["arm"], cell["load"], cell["rate_rps"], cell["requests"]) == (arm, None, 20.0, 12)
        assert cell["parity"]["equal"] == cell["parity"]["steps"] > 0
        assert cell["errors"]["ttft_s"]["spread"] is None
    (rate,) = fidelity["rates"]
    assert rate["errors"]["e2e_s"]["measured_mean_s"] > 0
    assert {"tau", "regret"} <= rate.keys()
    assert "goals" not in fidelity, "one run of each arm shows none"
    assert len(list(tmp_path.glob("rag/pic_clean*/simulated/*.jsonl"))) == 4 + 2
    run(tmp_path, "seeds=[0]")
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["backend=sim", "analyses=[compare_backends]"],
            "analyses=compare_backends with backend=sim: expected backend=e",
        ),
        (["analyses=[sumary]"], r"analyses=sumary: expected one of .*did you mean summary"),
        (["analyses=[]"], r"analyses=\[\]: expected one or more of answers"),
        (["analyses=[fit_profile]"], "analyses=fit_profile with workload.kind=rag: expected fit_profile with designed"),
        (["repeats=2", "analyses=[summary]"], "repeats=2 with analyses=summary: expected repeats=1"),
        (["repeats=2", "backend=sim"], "with backend=sim: expected backend=engine"),
        (["repeats=2", "backend=sim", "analyses=[summary]"], "repeats=2 with backend=sim: expected 1"),
    ],
)
def test_an_analysis_without_its_data_is_refused(overrides: list[str], message: str):
    with pytest.raises(Exception, match=message):
        compose("pic_clean", overrides)
