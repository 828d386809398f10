"""Compile launches for a device that is not here: each is specialised and compiled as there, and not started."""

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
    """One launch: the kernel's name, its constants and options, and what the compiler made of it."""

    name: str
    options: dict[str, Any]
    kernel: Any

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return int(self.kernel.metadata.shared)


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Within, launches on CPU tensors compile for this compute capability; the list has them in order.

    For a process of its own: Triton keeps the device that it was told of. RuntimeError for a kernel that asks for more
    shared memory than a block may have.
    """
    target, found, run = GPUTarget("cuda", capability, 32), list[Compiled](), JITFunction.run
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        found.append(compiled := Compiled(self.__name__, options, kernel))
        if compiled.shared > SHARED_MEMORY[capability]:
            raise RuntimeError(f"{self.__name__} asks for {compiled.shared} bytes of shared memory.")
        return kernel

    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
