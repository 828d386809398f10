"""What the command line answers without a run, and what it says of words that set nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest

from spanlab.cli import environments
from spanlab.cli.arguments import read
from spanlab.cli.describe import entries
from spanlab.errors import is_user_error, sentence


def test_version_names_version_and_commit(spanlab):
    said = spanlab("--version")
    assert said.code == 0
    assert said.out.startswith("spanlab 0.")
    assert "commit " in said.out


@pytest.mark.parametrize(("kind", "shown"), [("entries", "quality_sim"), ("figures", "pareto"), ("models", "qwen3-8b")])
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


@pytest.mark.parametrize("typed", ["store.total_gib=0.001", "seeds=[]", "only=[nope]"])
def test_dry_checks_what_a_run_checks(typed, spanlab, one_sentence):
    one_sentence(spanlab("-cn", "smoke", "--dry", typed), typed.partition("=")[0], "expected")


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
    """Stands for a program that was replaced by another one."""


@dataclass
class Started:
    """What would have replaced this program."""

    arguments: list[str]
    environment: str


@pytest.fixture
def started(monkeypatch):
    seen = []

    def replace(program, arguments, variables):
        seen.append(Started(arguments, variables["SPANLAB_ENVIRONMENT"]))
        raise StartedError

    monkeypatch.setattr(os, "execvpe", replace)
    monkeypatch.setattr(environments, "find_spec", lambda name: None)
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
