"""The entry from the command line's words to its folder: files, interruptions, refusals."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from spanlab import main
from spanlab.bench.rows import RowFile
from spanlab.evaluation.trained import require_trained
from spanlab.pic_bench import run, timing
from spanlab.pic_bench.rows import Row

FEW = ("only=[none,radix,pic]", "output.figures=false")


def test_a_run_leaves_its_settings_rows_summary_and_figures(folder, read):
    rows, summary = read(folder)
    kept = {"config.yaml", "rows.jsonl", "summary.json", "figures", "tiny.readings.jsonl"}
    assert {path.name for path in folder.iterdir()} == kept
    assert sorted(path.name for path in (folder / "figures").iterdir()) == [
        f"{name}_tiny.{kind}" for name in ("parts", "speedup", "ttft") for kind in ("pdf", "png")
    ]
    assert summary["weights"] == "random"
    assert (summary["device"], summary["threads"], summary["tokenizer"]) == ("cpu", 1, "builtin")
    assert summary["rates"] == {"flops_per_s": 1e11, "bytes_per_s": 1e10}
    assert {"commit", "versions", "wall_s"} <= summary.keys()
    assert summary["engine"].keys() == {"torch", "transformers"}
    assert len(rows) == 4 * len(summary["entries"])


def test_the_summary_is_that_of_its_rows(folder, read):
    rows, summary = read(folder)
    for entry in summary["entries"]:
        warm = [r for r in rows if (r["arm"], r["order"], r["kind"]) == (entry["arm"], entry["order"], "warm")]
        base = {r["index"]: r for r in rows if r["arm"] == "none"}
        times = sorted(r["ttft_s"] for r in warm)
        assert entry["warm_ttft_s"]["p50"] == times[1]
        assert entry["speedup"]["p50"] == sorted(base[r["index"]]["ttft_s"] / r["ttft_s"] for r in warm)[1]
        assert entry["of_bound"] == sorted(r["bound_s"] / r["ttft_s"] for r in warm)[1]
        ratios = sorted(base[r["index"]]["bound_s"] / r["bound_s"] for r in warm)
        assert entry["bound_speedup"] == ratios[1]
        assert entry["token_hit_rate"] == sum(r["reused_tokens"] for r in warm) / sum(r["prompt_tokens"] for r in warm)


def test_an_interrupted_run_keeps_its_finished_cells_and_ends_complete(settings, tmp_path, monkeypatch, read):
    real, asked = timing.run_cell, []

    def interrupted(toy, ground, cell, trial):
        for row in real(toy, ground, cell, trial):
            if cell.arm == "pic" and row.index == 2:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(timing, "run_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(settings(*FEW, "output.run=cut"), "pic_bench", tmp_path)
    kept = (tmp_path / "pic_bench" / ".cut.partial" / "rows.jsonl").read_text().splitlines()
    assert len(kept) == 4 * 3 + 2

    def watched(toy, ground, cell, trial):
        asked.append(cell.arm)
        return real(toy, ground, cell, trial)

    monkeypatch.setattr(timing, "run_cell", watched)
    folder = run.run_bench(settings(*FEW, "output.run=cut", "output.if_exists=resume"), "pic_bench", tmp_path)
    assert asked == ["pic"]
    rows, summary = read(folder)
    assert [json.dumps(row) for row in rows[:12]] == [json.dumps(json.loads(line)) for line in kept[:12]]
    assert len(rows) == 16
    assert [(e["arm"], e["requests"]) for e in summary["entries"]] == [
        ("none", 3),
        ("radix", 3),
        ("radix", 3),
        ("pic", 3),
    ]


def test_a_resumed_run_must_have_the_same_settings(settings, tmp_path, folder):
    shutil.copytree(folder, tmp_path / "pic_bench" / "whole")
    with pytest.raises(ValueError, match=r"output\.if_exists=resume: .* \(.*repeats: 3 there, repeats: 2 now\)"):
        run.run_bench(settings("output.run=whole", "output.if_exists=resume", "repeats=2"), "pic_bench", tmp_path)


def test_a_cut_line_and_a_part_of_a_cell_are_dropped(folder, tmp_path, read):
    lines = (folder / "rows.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(lines[:6]) + lines[6][:40])
    first = Row(**json.loads(lines[0]))
    with RowFile(path, Row, {Row(**json.loads(line)).cell: 4 for line in lines}) as file:
        assert file.done == {first.cell}
        assert [row.index for row in file.rows] == [0, 1, 2, 3]
    assert path.read_bytes() == b"".join(lines[:4])


def test_json_is_the_only_thing_said_on_stdout(settings, tmp_path, capsys):
    told = ("outputs=[json,latency]", "output.run=json", *FEW)
    folder = run.run_bench(settings(*told), "pic_bench", tmp_path)
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "summary.json").read_text())


def test_outputs_choose_the_columns(folder, read, settings):
    from rich.console import Console

    from spanlab.pic_bench.table import as_table

    entries = read(folder)[1]["entries"]

    def words(*outputs: str) -> str:
        console = Console(width=250, file=None, record=True, quiet=False)
        with console.capture() as captured:
            console.print(as_table(entries, set(outputs), "none"))
        return captured.get()

    assert "speedup" in words("speedup").split("TTFT = ")[0]
    assert "speedup" not in words("latency", "iqr").split("TTFT = ")[0]
    assert "hit rate" in words("hit_rate").split("TTFT = ")[0]
    assert "prepare" not in words("speedup", "latency", "hit_rate", "iqr")
    assert all(arm in words("latency") for arm in settings().arms)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sizes=[xxxl]"], "sizes=xxxl: expected one of xs, sm"),
        (["sizes=[]"], r"sizes=\[\]: expected one or more"),
        (["outputs=[speed]"], "outputs=speed: expected one of speedup, .*did you mean speedup"),
        (["documents=300"], "documents=300: expected 1 to 256"),
        (["only=[pic]"], r"only=\['pic'\]: expected the baseline none"),
        (["baseline=radix"], "baseline=radix: expected an arm with keep=false"),
        (["engine.weights=path"], "engine.path=None with engine.weights=path"),
        (["engine.weights=path", "engine.path=x", "models=[a,b]"], "expected one model"),
        (["arms.radix.page=3"], r"arms\.radix\.page=3: expected a power of two"),
        (["judge.base_url=http://localhost"], "judge.base_url with outputs="),
        (["engine.name=tiny"], r"engine.name=tiny: expected models="),
        (["engine.temperature=1"], "engine.temperature=1.0: expected 0"),
        (["engine.dtype=int8"], "engine.dtype=int8: expected one of float32"),
        (["engine.device=tpu"], "engine.device is 'tpu'"),
        (["engine.device=cuda:99"], "engine.device is 'cuda:99'"),
        (["models=[tinny]"], "model.name is 'tinny' with random weights, expected one of tiny"),
        (["outputs=[accuracy]"], "weights=random: expected trained weights"),
        (
            ["documents=40", "sizes=[xxl]"],
            "sizes=xxl with documents=40: .* expected at most the 65,536 positions of tiny",
        ),
        (["trials=1000"], "trials=1000 with documents=4: expected at most 500"),
        (["tokenizer=/nowhere"], "tokenizer=/nowhere holds no tokenizer.json"),
    ],
)
def test_a_mistake_is_one_sentence(settings, tmp_path, overrides, words):
    with pytest.raises(Exception, match=words) as told:
        run.run_bench(settings(*overrides), "pic_bench", tmp_path)
    root = told.value
    while root.__cause__ or root.__context__:
        root = root.__cause__ or root.__context__
    assert "\n" not in str(root) or not isinstance(root, ValueError)


def test_a_tokenizer_without_a_template_is_refused(settings, tmp_path):
    from spanlab.queries import builtin_tokenizer

    builtin_tokenizer().tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no chat template; expected a folder"):
        run.run_bench(settings(f"tokenizer={tmp_path}"), "pic_bench", tmp_path)


def test_a_model_of_the_hub_that_cannot_be_had_is_refused(settings, tmp_path, monkeypatch):
    import huggingface_hub

    def unreachable(*given, **more):
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"models=some/model with engine\.weights=hub: expected .*; no route to host$"):
        run.run_bench(settings("engine.weights=hub", "models=[some/model]"), "pic_bench", tmp_path)


def test_without_torch_the_entry_says_what_is_missing(monkeypatch, capsys, tmp_path):
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setitem(sys.modules, "spanlab.pic_bench.run", None)
    monkeypatch.setattr(sys, "argv", ["spanlab", "-cn", "pic_bench", f"output.root={tmp_path}"])
    with pytest.raises(SystemExit):
        main.main()
    said = capsys.readouterr().err
    assert said.startswith("spanlab: the entry pic_bench runs models on the engine")
    assert said.count("\n") == 1


def test_full_sweeps_every_size_and_the_tiny_models(settings):
    toy = settings("full=true")
    assert toy.swept_sizes == ["xs", "sm", "m", "lg", "xl", "xxl"]
    assert toy.swept_models == ["tiny", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"]
    assert settings("sizes=[xxl,xs]").swept_sizes == ["xs", "xxl"]


def test_only_trained_weights_are_scored():
    with pytest.raises(ValueError, match="KL and top-1 agreement"):
        require_trained("random")
