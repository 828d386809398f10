"""Triton kernels for position-independent attention, each with a torch reference that defines its result."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

from torch import Tensor

# ------------------------------------------------------------------------------
# Choice of the implementation of an operation: Triton on a CUDA device, the CPU path everywhere
# else.
# ------------------------------------------------------------------------------


def uses_triton(tensor: Tensor) -> bool:
    """Whether Triton runs operations on this tensor: it is on a CUDA device and Triton is installed.

    CPU tensors never reach Triton here, whatever TRITON_INTERPRET is; its interpreter is for tests, which call the
    launchers directly. Warn once of a CUDA device without Triton.
    """
    if not tensor.is_cuda:
        return False
    if not _has_triton():
        _warn_once()
        return False
    return True


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _warn_once() -> None:
    warnings.warn("Triton is not installed: torch references serve on this CUDA device, slowly.", stacklevel=4)
