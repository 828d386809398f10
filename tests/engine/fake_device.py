"""A CUDA device without a device: its tensors have shapes and no numbers, the host's are real.

Everything that torch is asked for passes one dispatch mode. Tensors on `cuda` are torch's fake tensors, which refuse
operands on two devices; tensors on the CPU keep their numbers, so that the engine's host path runs as it does beside a
card. What would wait for the device is noted with the place that asks for it, and gets numbers that stand in.
Kernels are launched by their own launchers: grids, buffers and arguments are made and checked, and nothing runs.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from spanlab.engine.model import SpanModel
from spanlab_kernels import _has_triton

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
PROCESSORS = 132
#: Operations whose number of results depends on numbers: torch waits for the device to count them.
COUNTED = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim)
#: Operations that look whether they went well.
CHECKED = (aten._linalg_svd, aten._linalg_eigh, aten.linalg_cholesky_ex, aten.linalg_inv_ex, aten._linalg_solve_ex)
OURS = ("spanlab", "spanlab_kernels")


@dataclass(frozen=True)
class Wait:
    """One time that the host waits for the device: why, and the function that makes it."""

    why: str
    place: str

    def __str__(self) -> str:
        return f"{self.place} {self.why}"


@dataclass
class FakeDevice(TorchDispatchMode):
    """Notes what waits, copies to the device, and kernels that are launched.

    `reached`   waits from the start, as a number
    `variants`  kernels from the start, with their static arguments
    """

    waits: list[Wait] = field(default_factory=list)
    reached: int = 0
    copies: int = 0
    kernels: list[str] = field(default_factory=list)
    variants: set[tuple[object, ...]] = field(default_factory=set)
    _pinned: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def forget(self) -> None:
        """Begin the next step."""
        self.waits, self.copies, self.kernels = [], 0, []

    def wait(self, why: str) -> None:
        """Note that the host waits."""
        self.reached += 1
        self.waits.append(Wait(why, _place()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        target = kwargs.get("device")
        moves = target is not None and torch.device(target).type == "cuda"
        if not on_device and not moves:
            return self._on_host(func, args, kwargs)
        if func.overloadpacket in (aten._to_copy, aten.copy_):
            return self._moved(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            self.wait("reads a number")
            with unset_fake_temporarily():
                return _stand_in(args[0]).flatten()[0].item()
        self._check_hidden(func, args, kwargs)
        return func(*args, **kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        pinned = kwargs.get("pin_memory")
        with unset_fake_temporarily():
            result = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        if pinned:
            self._pinned.add(result.untyped_storage().data_ptr())
        return result

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy between host and device, or within the device."""
        source = args[1] if func.overloadpacket is aten.copy_ else args[0]
        target = args[0].device if func.overloadpacket is aten.copy_ else kwargs.get("device", source.device)
        target = torch.device(target)
        if source.is_cuda and target.type == "cpu":
            self.wait("copies to the host")
            with unset_fake_temporarily():
                found = _stand_in(source).to(kwargs.get("dtype") or source.dtype)
                return args[0].copy_(found) if func.overloadpacket is aten.copy_ else found
        if not source.is_cuda and source.dim():
            self.copies += 1
            if source.untyped_storage().data_ptr() not in self._pinned or not _non_blocking(args, kwargs):
                self.wait("copies from memory that is not pinned")
        return func(*args, **kwargs)

    def _check_hidden(self, func: Any, args: Any, kwargs: Any) -> None:
        """Waits that are no copies."""
        if func.overloadpacket in COUNTED:
            self.wait(f"counts what {func.overloadpacket.__name__} gives")
        if func.overloadpacket in CHECKED:
            self.wait(f"checks what {func.overloadpacket.__name__.strip('_')} gives")
        if func.overloadpacket is aten.repeat_interleave and kwargs.get("output_size") is None:
            self.wait("counts what repeat_interleave gives")
        if func.overloadpacket in (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait("counts what a mask chooses")
            if any(not index.is_cuda for index in indices):
                self.wait("copies indices from memory that is not pinned")

    # -- kernels ------------------------------------------------------------------------------------------------------

    def launch(self, kernel: Any) -> Callable[..., None]:
        """Replaces a kernel launch on a grid: checks the arguments and computes nothing."""
        options = {"num_warps", "num_stages", "num_ctas", "maxnreg"}

        def launched(*args: Any, **kwargs: Any) -> None:
            bound = inspect.signature(_python(kernel)).bind(
                *args, **{k: v for k, v in kwargs.items() if k not in options}
            )
            for name, value in bound.arguments.items():
                assert not isinstance(value, Tensor) or value.is_cuda, f"{kernel.__name__}({name}) lies on the host"
            self.kernels.append(_python(kernel).__name__)
            self.variants.add((_python(kernel).__name__, *sorted(kwargs.items())))

        return launched


def _python(kernel: Any) -> Callable[..., Any]:
    """The original function below all decorators."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _non_blocking(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _stand_in(tensor: Tensor) -> Tensor:
    """Numbers on the host for a tensor without any: all different where they are integers, true, or zero."""
    if tensor.dtype == torch.bool:
        return torch.ones(tensor.shape, dtype=torch.bool)
    if tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)


def _place() -> str:
    """The innermost function of ours, or of transformers."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] in (*OURS, "transformers"):
            return f"{name.removeprefix('spanlab.')}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "test"


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """A machine with one CUDA device, `DEVICE`, as far as torch, Triton and the engine can tell."""
    device, mode = FakeDevice(), FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_device_guard())
        for owner, name, stand_in in (
            (torch.cuda, "synchronize", lambda *given: device.wait("waits for everything")),
            (torch.cuda, "Event", lambda **given: _Event(device)),
            (
                torch.cuda,
                "get_device_properties",
                lambda *given: SimpleNamespace(multi_processor_count=PROCESSORS, name="fake", major=9, minor=0),
            ),
            (KernelInterface, "__getitem__", lambda kernel, grid: device.launch(kernel)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(mode)
        stack.enter_context(device)
        yield device
    _has_triton.cache_clear()


class _Event:
    """An event of a stream: complete once the host has waited for later work."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self._recorded = device, 0

    def record(self, *given: object) -> None:
        """As torch's."""
        self._recorded = self._device.reached

    def query(self) -> bool:
        """As torch's."""
        return self._device.reached > self._recorded

    def synchronize(self) -> None:
        """As torch's: the host waits."""
        self._device.wait("waits for an event")

    def elapsed_time(self, other: _Event) -> float:
        """As torch's, in milliseconds."""
        assert other.query(), "an event was read that may not be over"
        return 0.0


@contextmanager
def _device_guard() -> Iterator[None]:
    """Torch without CUDA lacks what sets the current device; that of `meta`, which does nothing, serves instead."""
    if torch.version.cuda:
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before, guards[cuda] = guards[cuda], guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


def on_device(model: SpanModel) -> SpanModel:
    """The same model with weights on the fake device; to be called with the device entered."""
    hf = deepcopy(model.hf)
    for module in hf.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(_like(weight), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _like(buffer)
    found = replace(model, hf=hf)
    assert isinstance(hf.get_input_embeddings().weight, FakeTensor) and found.device == DEVICE
    return found


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
