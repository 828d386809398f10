"""Compile for sm_90 where there is none; run as a process of its own: python hopper.py CALLS.

CALLS are Python statements that call launchers on CPU tensors. Each launch is specialised and compiled to a cubin just
as on the device, but not started. Prints a JSON list of [kernel, bytes of shared memory], one for each launch.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # bytes that one block may have on sm_90
compiled: list[tuple[str, int]] = []
run = JITFunction.run


def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """What a launch does, less the launch."""
    kernel = run(self, *arguments, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"], f"{self.__name__} did not compile"
    shared = kernel.metadata.shared
    assert shared <= SHARED_MEMORY, f"{self.__name__} wants {shared} bytes of shared memory"
    compiled.append((self.__name__, shared))
    return kernel


if __name__ == "__main__":
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: TARGET,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    JITFunction.run = compile_only
    exec(sys.argv[1], {})
    print(json.dumps(compiled))
