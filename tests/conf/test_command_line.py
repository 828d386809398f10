"""Answers of the command line without a run, and errors for words that set nothing."""

import os
import sys
from dataclasses import dataclass

import pytest

from spanlab import cli
from spanlab.cli import entries, read
from spanlab.compiled import CONF
from spanlab.errors import MOVED_ENTRIES, is_user_error, sentence

from ..support.files import write_lines


def test_version_names_version_and_commit(spanlab):
    said = spanlab("--version")
    assert said.code == 0
    assert said.out.startswith("spanlab 0.")
    assert "commit " in said.out


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("entries", "quality_sim"), ("figures", "pareto"), ("models", "qwen3-8b"), ("timing.kind", "roofline")],
)
def test_list_shows_one_kind(kind, shown, spanlab):
    said = spanlab("--list", kind)
    assert said.code == 0
    assert any(line.strip().startswith(shown) for line in said.out.splitlines())


def test_list_shows_the_arms_of_an_entry(spanlab):
    said = spanlab("-cn", "smoke", "--list", "arms", "+strategy@arms.mine=radix")
    assert "mine" in said.out.split()


def test_an_unknown_list_names_the_known_ones(spanlab, one_sentence):
    one_sentence(
        spanlab("--list", "modls"), "--list=modls: expected one of model (did you mean model?), entries, figures"
    )


def test_help_explains_each_key(spanlab):
    said = spanlab("-cn", "quality_sim", "--help", "arrivals.rate_rps=3.5").out
    (line,) = [line for line in said.splitlines() if line.strip().startswith("arrivals.rate_rps=")]
    assert line.split()[0] == "arrivals.rate_rps=3.5"
    assert "per second" in line
    assert all(f"\n  {entry} " in said for entry in entries())


def test_dry_says_what_would_run_and_runs_nothing(spanlab, toy, tmp_path):
    said = spanlab("-cn", "smoke", "--dry", *toy, "only=dp_3", f"output.root={tmp_path}")
    assert said.code == 0
    assert "arms      1: dp_3" in said.out
    assert "requests  6 per run, 6 in total" in said.out
    assert list(tmp_path.rglob("summary.json")) == []


@pytest.mark.parametrize(
    ("entry", "typed", "words"),
    [
        ("explain", "log={here}/none.jsonl", "none.jsonl"),
        ("explain", "log={here}/one.jsonl store.kv_gib=1", "store.kv_gib=1.0 with analyses=explain"),
        (
            "explain",
            "log={here}/one.jsonl store.total_gib=0.00001",
            "store.total_gib=1e-05 with arms.vllm_0_32: expected",
        ),
        ("twin", "log={here}/one.jsonl", "one.jsonl"),
        ("plan", "log={here}/one.jsonl slo.ttft_p50_s=1 plan.search=[tier]", "store.tiers={} with plan.search=tier"),
        ("smoke", "output.if_exists=resume output.run=x", "output.if_exists=resume: "),
        ("smoke", "output.if_exists=fail output.run=x sweep=['store.total_gib=1,2']", "output.run=x"),
        ("smoke", "workload.path={here}/none.jsonl", "workload.path="),
        ("smoke", "sweep=[nonsense]", "sweep=nonsense: expected KEY=A,B"),
        ("schedule", "cases={here}/none.json out={here}/out.json", "none.json"),
        ("schedule", "cases={here}/one.jsonl out={here}/out.json preset=vlm", "preset=vlm: expected one of vllm_0_32"),
        ("compare", "runs=[{here}/a,{here}/b]", "expected the folder of a finished run"),
        ("export", "writer.format=openai writer.path={here}/one.jsonl", "writer.path="),
    ],
)
def test_dry_says_what_a_run_says(entry, typed, words, spanlab, one_sentence, toy, tmp_path):
    write_lines(tmp_path / "one.jsonl", {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]})
    (tmp_path / "quality" / "x").mkdir(parents=True)
    (tmp_path / "quality" / "x" / "config.yaml").write_text("{arms: {}, seeds: [7]}")
    study = (f"output.root={tmp_path}",) if entry not in ("schedule", "export") else ()
    given = [*study, *(toy if entry == "smoke" else ()), *typed.format(here=tmp_path).split()]
    said = [spanlab("-cn", entry, *dry, *given) for dry in (["--dry"], [])]
    one_sentence(said[0], "")
    assert words in said[0].ours[0]
    assert said[0].ours == said[1].ours


def test_dry_checks_each_point_of_a_sweep_as_its_run(spanlab, one_sentence, toy, tmp_path):
    given = ("-cn", "smoke", *toy, "only=[none]", f"output.root={tmp_path}", "store.total_gib=0.001")
    points = "sweep=['store.total_gib=0.002,0.001']"
    said, ended = spanlab(*given, "--dry", points), spanlab(*given, points)
    one_sentence(said, "sweep=['store.total_gib=0.002,0.001']: store.total_gib=0.002: store.total_gib=0.002: expected")
    one_sentence(ended, "no point of the sweep completed, the first error: ")
    assert ended.ours[0].endswith(said.ours[0].partition("]: ")[2])
    assert spanlab(*given, "--dry", "sweep=['store.total_gib=2,4']").code == 0  # no run has the memory of the base


def test_dry_of_an_engine_entry_needs_no_torch(spanlab, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert spanlab("-cn", "quality_clean", "--dry").code == 0


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("quality_sim", ("quality_sim is an entry: expected -cn quality_sim",)),
        ("help", ("help: expected --help",)),
        ("folder", ("folder: expected KEY=VALUE",)),
        ("output.root=/my folder (1)", ("output.root=/my folder (1): expected KEY=VALUE", """'output.root="my""")),
        ("--dri", ("--dri: no such option; expected --dry",)),
    ],
)
def test_a_word_that_sets_nothing_is_explained(typed, words, spanlab, one_sentence):
    one_sentence(spanlab(typed), *words)


@pytest.mark.parametrize(
    ("typed", "many", "meant"),
    [
        ("only=dp_3", False, "only=[dp_3]"),
        ("seeds=0,1", False, "seeds=[0,1]"),
        ("seeds=0,1", True, "seeds=[0],[1]"),
        ("seeds=[0]", False, "seeds=[0]"),
        ("arms.dp_3.placement.also=last", False, "arms.dp_3.placement.also=[last]"),
        ("store.total_gib=1,2", True, "store.total_gib=1,2"),
        ("sweep=store.total_gib=1,2", False, 'sweep=["store.total_gib=1,2"]'),
    ],
)
def test_one_value_is_a_list_of_one(typed, many, meant):
    assert read([*(["-m"] if many else []), typed]).overrides == [meant]


def test_a_quoted_path_may_have_spaces(spanlab, toy, tmp_path):
    done = spanlab("-cn", "smoke", *toy, "only=none", f'output.root="{tmp_path}/my folder (1)"', "output.run=x")
    assert done.code == 0, done.err
    assert (tmp_path / "my folder (1)/quality/x/summary.json").exists()


class StartedError(Exception):
    """Represents a program that was replaced by another one."""


@dataclass
class Started:
    """The command that would have replaced this program."""

    arguments: list[str]
    environment: str


@pytest.fixture
def started(monkeypatch):
    seen = []

    def replace(program, arguments, variables):
        seen.append(Started(arguments, variables["SPANLAB_ENVIRONMENT"]))
        raise StartedError

    monkeypatch.setattr(os, "execvpe", replace)
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    monkeypatch.setenv("SPANLAB_ENVIRONMENT", "sim")
    return seen


@pytest.mark.parametrize(
    ("typed", "environment"),
    [
        (("-cn", "pic_bench"), "engine"),
        (("-cn", "quality_clean"), "engine"),
        (("-cn", "quality_fidelity", "-m", "seeds=0,1"), "engine"),
        (("-cn", "smoke", "executor=dask", "executor.address=tcp://x:1"), "cluster"),
        (("-cn", "smoke", "-m", "hydra/launcher=submitit_slurm_none"), "cluster"),
    ],
)
def test_the_environment_follows_from_the_settings(typed, environment, started, spanlab):
    with pytest.raises(StartedError):
        spanlab(*typed)
    (one,) = started
    assert one.environment == environment
    assert one.arguments[2:] == list(typed)


@pytest.mark.parametrize(
    "typed", [("-cn", "quality_clean", "backend=sim", "--dry"), ("-cn", "pic_bench", "--cfg", "job")]
)
def test_what_needs_no_engine_stays(typed, started, spanlab):
    assert spanlab(*typed).code == 0
    assert started == []


def test_slurm_jobs_without_slurm_are_explained():
    error = RuntimeError('Could not detect "srun", are you indeed on a slurm cluster?')
    assert is_user_error(error)
    assert sentence(error).startswith("hydra/launcher: expected a machine with Slurm")
    assert not is_user_error(RuntimeError("a fault of the program"))


@pytest.mark.parametrize("name", MOVED_ENTRIES)
def test_a_moved_entry_names_its_script(name, spanlab, one_sentence):
    one_sentence(spanlab("-cn", name), f"entry {name}: now a script", f"benchmarks/hybrid_answers/{name}.py")
    assert (CONF.parent / MOVED_ENTRIES[name]).is_file()
