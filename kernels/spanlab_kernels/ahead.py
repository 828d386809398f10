"""Compile kernel launches for another device: each is specialised and compiled as on that device, and not run."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have, by compute capability."""


@dataclass(frozen=True)
class Compiled:
    """One compiled launch: the name of the kernel, its constants and options, and the compiled kernel."""

    name: str
    options: dict[str, Any]
    kernel: Any

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return int(self.kernel.metadata.shared)


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Compile launches on CPU tensors for this compute capability, and list them in order, within the context.

    Use it in a separate process: the device stays set in Triton after the context. RuntimeError for a kernel that needs
    more shared memory than a block may have.
    """
    target, launches, run = GPUTarget("cuda", capability, 32), list[Compiled](), JITFunction.run
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        launches.append(compiled := Compiled(self.__name__, options, kernel))
        if compiled.shared > SHARED_MEMORY[capability]:
            raise RuntimeError(f"{self.__name__} asks for {compiled.shared} bytes of shared memory.")
        return kernel

    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run
