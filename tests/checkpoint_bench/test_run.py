"""The entry from the command line's words to its folder: files, interruptions, refusals."""

from __future__ import annotations

import shutil
import sys

import pytest

from spanlab import main
from spanlab.checkpoint_bench import run
from spanlab.checkpoint_bench.rounds import Length

FEW = ("only=[none,dp_1]", "output.figures=false", "rounds=2")


def test_a_run_leaves_its_settings_rows_summary_and_figures(folder, read):
    rows, summary = read(folder)
    kept = {"config.yaml", "rows.jsonl", "summary.json", "figures", "tiny-hybrid.readings.jsonl"}
    assert {path.name for path in folder.iterdir()} == kept
    assert len(list((folder / "figures").iterdir())) == 8
    assert (summary["device"], summary["threads"], summary["weights"]) == ("cpu", 1, "random")
    assert summary["rates"] == {"flops_per_s": 1e11, "bytes_per_s": 1e10}
    assert {"commit", "versions", "wall_s", "machine", "load"} <= summary.keys()
    assert {row.model for row in rows} == {"tiny-hybrid"}


def test_the_tables_name_every_arm(folder, read, settings):
    from rich.console import Console

    from spanlab.checkpoint_bench.table import as_tables

    console = Console(width=250)
    with console.capture() as captured:
        console.print(as_tables(read(folder)[1], "none", "cpu2"))
    said = captured.get()
    assert all(arm in said for arm in settings().arms)
    assert "captures of at most 8 states may cost 5.0 %" in said


def test_an_interrupted_run_keeps_its_finished_rounds_and_ends_complete(settings, tmp_path, monkeypatch, read):
    real, asked = Length.round, []

    def interrupted(length, cell):
        for number, row in enumerate(real(length, cell)):
            if cell.round == 1 and number == 2:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(Length, "round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(settings(*FEW, "output.run=cut"), "checkpoint_bench", tmp_path)
    kept = (tmp_path / "checkpoint_bench" / ".cut.partial" / "rows.jsonl").read_bytes().splitlines()

    def watched(length, cell):
        asked.append(cell.round)
        return real(length, cell)

    monkeypatch.setattr(Length, "round", watched)
    again = settings(*FEW, "output.run=cut", "output.if_exists=resume")
    folder = run.run_bench(again, "checkpoint_bench", tmp_path)
    assert asked == [1]
    lines = (folder / "rows.jsonl").read_bytes().splitlines()
    assert lines[:5] == kept[:5]
    assert len(lines) == 10
    assert read(folder)[1]["captures"][0]["overhead"]["count"] == 2


def test_a_resumed_run_must_have_the_same_settings(settings, tmp_path, folder):
    shutil.copytree(folder, tmp_path / "checkpoint_bench" / "whole")
    again = settings("output.run=whole", "output.if_exists=resume", "rounds=2")
    with pytest.raises(ValueError, match=r"output\.if_exists=resume: .* \(.*rounds: 1 there, rounds: 2 now\)"):
        run.run_bench(again, "checkpoint_bench", tmp_path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lengths=[]"], r"lengths=\[\]: expected one or more"),
        (["lengths=[256,256]"], r"lengths=\[256, 256\]: expected one or more, all different"),
        (["lengths=[1]"], r"lengths=1 with depths=\[0\.5, 0\.8\]: expected more tokens"),
        (["depths=[1.0]"], "depths=1.0: expected shares of the length above 0 and below 1"),
        (["depths=[0.5,0.501]"], r"lengths=256 with depths=.*: expected more tokens, or other shares"),
        (["rounds=0"], "rounds=0: expected a number above zero"),
        (["only=[last]"], r"only=\['last'\]: expected the baseline none"),
        (["only=[lasst]"], "only=lasst: expected one of .*did you mean last"),
        (["baseline=last"], "baseline=last: expected an arm with keep=false"),
        (["models=[tiny]"], "models=tiny: expected a hybrid model"),
        (["models=[tinny]"], "model.name is 'tinny' with random weights, expected one of tiny"),
        (["lengths=[70000]"], "lengths=70000: expected at most the 65,536 positions of tiny-hybrid"),
        (["arms.last.page=96"], r"arms\.last\.page=96: expected a power of two"),
        (["engine.name=tiny-hybrid"], r"engine.name=tiny-hybrid: expected models="),
        (["engine.weights=path", "engine.path=x", "models=[a,b]"], "expected one model"),
        (["engine.device=cuda:99"], "engine.device is 'cuda:99'"),
    ],
)
def test_a_mistake_is_one_sentence(settings, tmp_path, overrides, words):
    with pytest.raises(Exception, match=words) as told:
        run.run_bench(settings(*overrides), "checkpoint_bench", tmp_path)
    root = told.value
    while root.__cause__ or root.__context__:
        root = root.__cause__ or root.__context__
    assert "\n" not in str(root) or not isinstance(root, ValueError)


def test_without_torch_the_entry_says_what_is_missing(monkeypatch, capsys, tmp_path):
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setitem(sys.modules, "spanlab.checkpoint_bench.run", None)
    monkeypatch.setattr(sys, "argv", ["spanlab", "-cn", "checkpoint_bench", f"output.root={tmp_path}"])
    with pytest.raises(SystemExit):
        main.main()
    said = capsys.readouterr().err
    assert said.startswith("spanlab: the entry checkpoint_bench runs models on the engine")
    assert said.count("\n") == 1


def test_by_default_every_kind_of_placement_is_there_and_all_arms_can_be_asked_for(settings):
    toy = main.compose("checkpoint_bench", ["tracking=none"])
    assert toy.lengths == [1024, 2048, 4096, 8192]
    assert set(toy.chosen()) < set(settings().chosen())
    assert toy.chosen()[0] == "none"
