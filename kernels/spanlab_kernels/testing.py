"""Cases and verdicts shared by the tests and the benchmarks of the kernels.

A result passes when its largest error is at most 1.5 times that of the same mathematics in the same
dtype in torch, plus a rounding floor, and its relative RMS error is under a limit of its dtype. No
environment variable changes these limits.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

RELATIVE_RMS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Verdict:
    """Result of `agrees`: the largest absolute error, the relative RMS error, and the limit of
    each."""

    error: float
    error_allowed: float
    relative_rms: float
    relative_rms_allowed: float

    def __bool__(self) -> bool:
        # written so that a NaN on either side fails
        return self.error <= self.error_allowed and self.relative_rms <= self.relative_rms_allowed


def agrees(
    result: Tensor, truth: Tensor, same_dtype_reference: Tensor, dtype: torch.dtype
) -> Verdict:
    """Compare `result` with `truth` (fp32 or better) and with torch's own result in `dtype`, all of
    one shape.

    The floor is one unit in the last place of the largest value. Where the truth is infinite (the
    log-sum-exp of a row without keys) the result must be the same infinity. A truth with NaN is an
    error of the test.
    """
    assert result.shape == truth.shape == same_dtype_reference.shape, (
        "result, truth and reference differ in shape"
    )
    assert not truth.isnan().any(), "the truth has NaN"
    limit = RELATIVE_RMS[dtype]
    truth = truth.detach().to("cpu", torch.float64)
    error, relative_rms = _errors(result.detach().to("cpu", torch.float64), truth)
    error_in_torch, _ = _errors(same_dtype_reference.detach().to("cpu", torch.float64), truth)
    finite = truth[truth.isfinite()]
    floor = torch.finfo(dtype).eps * float(finite.abs().max()) if len(finite) else 0.0
    return Verdict(error, 1.5 * error_in_torch + floor, relative_rms, limit)


def _errors(result: Tensor, truth: Tensor) -> tuple[float, float]:
    finite = truth.isfinite()
    if not torch.equal(result[~finite], truth[~finite]):
        return math.inf, math.inf
    if not finite.any():
        return 0.0, 0.0
    difference = result[finite] - truth[finite]
    norm, difference_norm = float(truth[finite].norm()), float(difference.norm())
    relative = difference_norm / norm if norm else (0.0 if difference_norm == 0.0 else math.inf)
    return float(difference.abs().max()), relative


def fresh(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """New memory filled with NaN, so that a read of an unwritten element shows in the result."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def random_tensor(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Standard normal numbers, identical on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def inverse_powers(rotary_dim: int, base: float = 10_000.0) -> Tensor:
    """RoPE's default frequencies base^(-2i / rotary_dim), [rotary_dim / 2], in radians per
    position."""
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


@dataclass(frozen=True)
class RopeCase:
    """A rotation case: one shift for all tokens, or with `shift=None` a random one per token in
    ±`reach`."""

    tokens: int
    heads: int
    head_dim: int
    rotary_dim: int
    shift: int | None
    reach: int = 4096
    interleaved: bool = False

    def __str__(self) -> str:
        pairs = "interleaved" if self.interleaved else "halves"
        shift = "each" if self.shift is None else self.shift
        return f"{self.tokens}x{self.heads}x{self.head_dim}r{self.rotary_dim}-{pairs}-{shift}"

    def shifts(self, device: torch.device | str = "cpu", seed: int = 0) -> int | Tensor:
        """The argument `shift` of `rotate`."""
        if self.shift is not None:
            return self.shift
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(
            -self.reach, self.reach + 1, (self.tokens,), generator=generator, dtype=torch.int32
        )
        return drawn.to(device)


ROPE_CASES = (
    RopeCase(1, 1, 64, 64, None),
    RopeCase(63, 2, 80, 80, -4096),
    RopeCase(75, 3, 96, 24, None, interleaved=True),
    RopeCase(75, 3, 96, 24, 1),
    RopeCase(500, 2, 128, 128, None),
    RopeCase(1000, 1, 128, 64, 17, interleaved=True),
    RopeCase(63, 7, 256, 64, None),
    RopeCase(75, 1, 256, 256, -1, interleaved=True),
)


@dataclass(frozen=True)
class BlockCase:
    """A copy case: `slots` rows of `heads` heads, in pages that hold both sources and targets."""

    slots: int
    page_size: int
    heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.slots}x{self.heads}x{self.head_dim}-page{self.page_size}"

    @property
    def num_pages(self) -> int:
        """Number of pages for sources and targets without a common row."""
        return 2 * -(-self.slots // self.page_size) + 1

    def two_sets(self, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
        """Source and target slots: distinct, disjoint, in random order, without slot 0."""
        generator = torch.Generator().manual_seed(seed)
        slots = (
            1
            + torch.randperm(self.num_pages * self.page_size - 1, generator=generator)[
                : 2 * self.slots
            ]
        )
        return slots[: self.slots].to(device), slots[self.slots :].to(device)


BLOCK_CASES = (
    BlockCase(1, 1, 1, 64),
    BlockCase(63, 16, 2, 80),
    BlockCase(75, 32, 8, 128),
    BlockCase(500, 64, 1, 96),
    BlockCase(63, 16, 10, 256),
)


# ------------------------------------------------------------------------------
# Compile kernel launches for another device: each is specialised and compiled as on that
# device, and not run.
# ------------------------------------------------------------------------------

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have, by compute capability."""


@dataclass(frozen=True)
class Compiled:
    """One compiled launch: the name of the kernel, its constants and options, and the compiled
    kernel."""

    name: str
    options: dict[str, Any]
    kernel: Any

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return int(self.kernel.metadata.shared)


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Compile launches on CPU tensors for this compute capability, and list them in order, within
    the context.

    Use it in a separate process: the device stays set in Triton after the context. RuntimeError for
    a kernel that needs more shared memory than a block may have.
    """
    target, launches, run = GPUTarget("cuda", capability, 32), list[Compiled](), JITFunction.run
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        launches.append(compiled := Compiled(self.__name__, options, kernel))
        if compiled.shared > SHARED_MEMORY[capability]:
            raise RuntimeError(
                f"{self.__name__} asks for {compiled.shared} bytes of shared memory."
            )
        return kernel

    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run
