"""The kernels under Triton's interpreter, or compiled if the run selects GPU tests and there is a GPU."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

VARIABLE = "TRITON_INTERPRET"
LAUNCHERS = ("spanlab_kernels.attention.triton", "spanlab_kernels.row_kernels", "spanlab_kernels.chunk_kernels")


def pytest_configure(config: pytest.Config) -> None:
    """Decorate our kernels for the interpreter before the test modules import them.

    Triton reads the variable when a kernel is decorated, also for kernels of its own library. Other tests of this
    process do not run kernels: the public operations use torch for CPU tensors.
    """
    if _compiles(config):
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        _load_for_the_interpreter()
    finally:
        _restore(before)


def _compiles(config: pytest.Config) -> bool:
    marks = config.getoption("markexpr")
    return torch.cuda.is_available() and "gpu" in marks and "not gpu" not in marks


def _load_for_the_interpreter() -> None:
    if "triton" in sys.modules:  # transformers imports it, and then its library is decorated for the compiler
        import triton.language as tl

        importlib.reload(tl.standard)
        importlib.reload(tl)
    for name in LAUNCHERS:
        assert name not in sys.modules, f"{name} was imported by a test of another package"
        importlib.import_module(name)


def _restore(value: str | None) -> None:
    if value is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = value


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton reads the variable again when a kernel runs; tests of other packages never have it
    if not _compiles(request.config):
        monkeypatch.setenv(VARIABLE, "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Device of a launcher's tensors: the interpreter runs it on the CPU, and it is compiled on CUDA."""
    if request.param == "cuda" and not _compiles(request.config):
        pytest.skip("needs a CUDA device, and -m gpu")
    return str(request.param)


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter compute in bfloat16 like a device: products of exact numbers, rounding to nearest even.

    Unpatched, it stores such numbers as bit patterns, multiplies the patterns, and truncates where a device rounds.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    multiply, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widened(x: Any) -> Any:
        data = (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data
        return interpreter.TensorHandle(data, tl.float32 if x.dtype.scalar == tl.bfloat16 else x.dtype)

    def product(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, widened(a), widened(b), *others)

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if (source, target) == (tl.float32, tl.bfloat16):
            near = torch.from_numpy(np.array(data, np.float32)).bfloat16()
            return near.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def compile_for(tmp_path: Path) -> Callable[..., list[list[tuple[str, int]]]]:
    """Compile calls for compute capabilities, given in turn; kernel names and their shared memory, for each."""

    def compiled(*programs: int | str) -> list[list[tuple[str, int]]]:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        environment["TRITON_CACHE_DIR"] = str(tmp_path / "triton")
        command = [sys.executable, str(Path(__file__).with_name("compile_only.py")), *map(str, programs)]
        process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        return [[(name, shared) for name, shared in kernels] for kernels in json.loads(process.stdout)]

    return compiled
