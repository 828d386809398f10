"""CPU tensors stay on the CPU path for any TRITON_INTERPRET; a GPU without Triton gives one warning."""

import os
import subprocess
import sys
import types
import warnings

import pytest

import spanlab_kernels

PUBLIC = """
import sys, torch
from spanlab_kernels import attention, blocks
from spanlab_kernels.blocks import angle_table
from spanlab_kernels.blocks import rotate
pages, slots = torch.zeros(2, 4, 1, 8), torch.tensor([3])
blocks.copy(pages, slots, slots + 1)
blocks.scatter(pages, slots, rotate(blocks.gather(pages, slots), 1, angle_table(torch.ones(4), 2)))
assert "triton" not in sys.modules
"""


def test_public_operations_on_a_cpu_never_load_triton(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", PUBLIC], env=environment, cwd=tmp_path, check=True)


@pytest.fixture
def has_triton(monkeypatch):
    """Set whether Triton is installed, and clear the cached results."""

    def set_installed(installed):
        for cached in (spanlab_kernels._has_triton, spanlab_kernels._warn_once):
            cached.cache_clear()
        monkeypatch.setattr(spanlab_kernels.importlib.util, "find_spec", lambda name: object() if installed else None)

    yield set_installed
    for cached in (spanlab_kernels._has_triton, spanlab_kernels._warn_once):
        cached.cache_clear()


def test_a_cuda_device_without_triton_warns_once(has_triton):
    has_triton(False)
    tensor = types.SimpleNamespace(is_cuda=True)
    with pytest.warns(UserWarning, match="Triton is not installed") as warned:
        assert [spanlab_kernels.uses_triton(tensor) for _ in range(3)] == [False] * 3
    assert len(warned) == 1


@pytest.mark.parametrize("is_cuda", [False, True])
def test_triton_runs_cuda_tensors_only(has_triton, is_cuda):
    has_triton(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spanlab_kernels.uses_triton(types.SimpleNamespace(is_cuda=is_cuda)) == is_cuda
