"""The entries `train_probe` and `hybrid_answers`: weights, tables, figures and report of a run."""

import csv
import json
from pathlib import Path

import pytest
from hybrid_answers import run_hybrid_answers
from probe_model import initial_model
from probe_report import run_program, settings_of
from probe_settings import HybridAnswers, TrainProbe
from train_probe import run_train_probe

ASKED = ("cases=[2x15,3x15]", "sequences=4", "norms.lengths=[15]", "norms.spans=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of a few steps."""
    return run_train_probe(settings_of(TrainProbe, ["training=quick"]), "base", tmp_path_factory.mktemp("probe"))


def rows(folder: Path, table: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_training_leaves_weights_and_curves(trained: Path):
    assert {"config.json", "model.safetensors"} <= {path.name for path in (trained / "weights").iterdir()}
    points = rows(trained, "training")
    assert points[-1]["step"] == "6"
    assert sum(int(row["steps"]) for row in points) == 6
    assert (trained / "figures" / "training.png").is_file()
    assert (trained / "report.html").is_file()
    summary = json.loads((trained / "summary.json").read_text())
    assert {"commit", "caveats", "versions", "machine", "seeds", "workload"} <= set(summary)
    assert "torch" in summary["versions"]


def test_answers_leave_a_table_per_case(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = settings_of(HybridAnswers, [f"weights={trained / 'weights'}", *ASKED])
    folder = run_hybrid_answers(settings, "answers", tmp_path)
    tables = {path.stem for path in (folder / "tables").iterdir()}
    assert tables == {"answers_2x15", "answers_3x15", "norms", "norms_by_head", "state_errors"}
    first, *_ = table_rows = rows(folder, "answers_3x15")
    assert (first["arm"], float(first["minus_full"])) == ("full view", 0.0)
    assert {"exact", "decay only", "sum", "last", "KV only"} <= {row["arm"] for row in table_rows}
    assert {path.name for path in folder.glob("figures/*.png")} == {"answers.png", "norms.png"}
    assert "Answers after 3 documents of 15 tokens" in capsys.readouterr().out


def test_training_goes_on_with_spans(trained: Path, tmp_path: Path):
    small = ("steps=4", "every=4", "batch_tokens=128", "documents=2", "longest=15", "output.figures=false")
    overrides = ["training=spans", f"start={trained / 'weights'}", *small]
    points = rows(run_train_probe(settings_of(TrainProbe, overrides), "spans", tmp_path), "training")
    assert {row["read"] for row in points} <= {"spans", "spans, no state"}


def test_spans_need_weights_to_start_from():
    with pytest.raises(ValueError, match=r"^start=FOLDER: expected a folder with a config\.json and weights"):
        initial_model(settings_of(TrainProbe, ["training=spans"]))


def test_another_vocabulary_is_refused(trained: Path, tmp_path: Path):
    overrides = [f"weights={trained / 'weights'}", *ASKED, "task.vocabulary=700"]
    with pytest.raises(ValueError, match=r"expected a vocabulary of task\.vocabulary=700, not 600"):
        run_hybrid_answers(settings_of(HybridAnswers, overrides), "answers", tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^weights=.*: expected a folder with a config\.json and weights"):
        run_hybrid_answers(settings_of(HybridAnswers, [f"weights={tmp_path}", *ASKED]), "answers", tmp_path)


@pytest.mark.parametrize(("schema", "words"), [(TrainProbe, []), (HybridAnswers, ["weights=x"])])
def test_resuming_is_refused(schema: type, words: list[str]):
    with pytest.raises(ValueError, match=r"output\.if_exists=resume: expected replace or fail"):
        settings_of(schema, [*words, "output.if_exists=resume"])


def test_a_mistake_on_the_command_line_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["train_probe.py", "training=nothing"])
    with pytest.raises(SystemExit, match=r"^train_probe: training=nothing: expected one of quick, spans$"):
        run_program(TrainProbe, run_train_probe)
