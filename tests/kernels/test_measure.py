"""The benchmark rejects results that do not agree, and reports a missing CUDA device."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"


@pytest.fixture(scope="module")
def measure():
    spec = importlib.util.spec_from_file_location("kernels_measure", FOLDER / "measure.py")
    module = importlib.util.module_from_spec(spec)
    path, modules_before = list(sys.path), set(sys.modules)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in {"cases", "timing"} - modules_before:
        del sys.modules[name]


@pytest.fixture
def quick(measure, monkeypatch):
    """Two rounds of everything."""
    monkeypatch.setitem(sys.modules["timing"].ROUNDS, "cpu", 2)
    return measure


def make_case(rows=5):
    return sys.modules["cases"].AttentionCase("prefill", 2, rows, 100, 3, 8, 2, head_dim=64)


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_arms_agree_and_are_timed(quick, rows, dtype):
    arm_rows = quick.measure(make_case(rows), dtype, "cpu")
    assert {row["arm"] for row in arm_rows} == {"SDPA", "KR", "QR", "MAT", "one span"}
    for row in arm_rows:
        assert row["agrees"], row
        assert row["quartiles_s"][0] <= row["median_s"] <= row["quartiles_s"][1]
        assert row["rounds"] == 2
    assert [row["to_sdpa"] for row in arm_rows if row["arm"] == "SDPA"] == [1.0]


def test_operations_and_bytes_are_those_of_the_visible_scores(measure):
    case = make_case()
    work = case.build(torch.bfloat16, "cpu")
    scores = sum(100 - 5 + 1 + row for row in range(5))
    assert work.operations == 2 * 8 * 2 * 2 * 64 * scores  # requests, heads, two products, multiply and add
    assert work.moved_bytes == 2 * 2 * 64 * (2 * 100 * 2 + 2 * 5 * 8)


def test_an_arm_that_does_not_agree_is_refused_and_not_timed(quick, monkeypatch):
    build = sys.modules["cases"].AttentionCase.build

    def build_with_a_wrong_arm(self, dtype, device):
        work = build(self, dtype, device)
        right = work.arms["QR"].call
        work.arms["QR"] = dataclasses.replace(work.arms["QR"], call=lambda: 1.0001 * right())
        return work

    monkeypatch.setattr(sys.modules["cases"].AttentionCase, "build", build_with_a_wrong_arm)
    rows_by_arm = {row["arm"]: row for row in quick.measure(make_case(), torch.float32, "cpu")}
    assert [arm for arm, row in rows_by_arm.items() if "median_s" not in row] == ["QR"]
    assert not rows_by_arm["QR"]["agrees"]
    quick.shares(rows_by_arm["QR"], {})
    assert "refused: error" in quick.cells(rows_by_arm["QR"])[2]


def test_a_missing_device_is_reported_without_an_error(measure, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["measure.py"])
    assert (measure.main(), capsys.readouterr().out) == (0, "not measured: no CUDA device\n")
