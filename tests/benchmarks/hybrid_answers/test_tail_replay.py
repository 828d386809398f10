"""The entry `tail_replay`: tables of random and of given weights."""

import csv
from pathlib import Path

import pytest
import torch
from probe_model import new_probe
from probe_report import settings_of
from probe_settings import ProbeModel, TailReplay
from tail_replay import run_tail_replay

SMALL = ("groups=[1,2]", "scores=[4]", "documents=2", "tokens=15", "gaps=[9]", "sequences=3", "models=[qwen3.5-0.8b]")


def rows(folder: Path, table: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tail_replay")
    torch.manual_seed(0)
    new_probe(ProbeModel(), 600).save_pretrained(root / "given" / "weights")
    settings = settings_of(TailReplay, [f"weights=[{root / 'given' / 'weights'}]", *SMALL])
    return run_tail_replay(settings, "small", root)


def test_every_model_has_rows(ran: Path):
    table_rows = rows(ran, "recoveries")
    assert {row["weights"] for row in table_rows} == {"trained, given", "random, scores 4"}
    assert {row["right"] == "" for row in table_rows if row["weights"] == "random, scores 4"} == {True}
    assert len(table_rows) == 3 * 5


def test_exact_and_inexact_recoveries_differ(ran: Path):
    kl = {(row["attention_below"], row["arm"]): float(row["kl"]) for row in rows(ran, "recoveries")}
    assert max(value for (_, arm), value in kl.items() if arm == "resident_kv") < 1e-9
    assert kl["0", "tail_replay"] < 1e-9 < 1e-5 < kl["1", "tail_replay"] < kl["1", "no_replay"]


def test_stored_states_count_their_bytes(ran: Path):
    bytes_by_format = {row["format"]: float(row["bytes"]) for row in rows(ran, "stored_states")}
    assert bytes_by_format == pytest.approx(
        {"bf16": 0.5, **dict.fromkeys(("int8 per row", "int8 per column"), 0.25 + 1 / 48)}
        | {"int8 per head": 0.25 + 1 / 48**2}
    )
    assert {row["gap"] for row in rows(ran, "stored_states")} == {"0", "9"}


def test_prices_and_layers_are_reported(ran: Path):
    assert [row["context"] for row in rows(ran, "prices")] == ["4096", "32768", "131072"]
    assert {row["attention_below"] for row in rows(ran, "state_errors")} == {"1"}
    assert (ran / "figures" / "recoveries.png").is_file()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gaps=[30]", r"gaps=30: expected 1 to 29 tokens"),
        ("scores=[]", r"scores=\[\]: expected \[\] where groups=\[\]"),
        ("sequences=1", r"sequences=1: expected 2 or more"),
        ("output.if_exists=resume", r"output\.if_exists=resume: expected replace or fail"),
        ("tokens=10", r"tokens=10: expected 11 or more"),
    ],
)
def test_a_setting_without_meaning_is_refused(override: str, expected: str):
    with pytest.raises(Exception, match=expected):
        settings_of(TailReplay, [*SMALL, override])


def test_another_vocabulary_is_refused(ran: Path, tmp_path: Path):
    overrides = [f"weights=[{ran.parent.parent / 'given' / 'weights'}]", "task.vocabulary=700", *SMALL]
    with pytest.raises(ValueError, match=r"weights=.*: expected a vocabulary of 700, not 600"):
        run_tail_replay(settings_of(TailReplay, overrides), "other", tmp_path)
