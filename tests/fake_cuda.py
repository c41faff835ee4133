"""A CUDA device without a GPU: tensors say `cuda:0` and hold their numbers in host memory.

With `FakeCuda()` entered, everything made on or moved to "cuda" is a `DeviceTensor`. torch's own CUDA rules apply to it
above the kernels (autocast lists, branches on the device), the kernels are those of the CPU. So values are real, and:

- an operator that mixes host and device tensors raises, as on a GPU;
- every host synchronisation is counted, with the function that caused it;
- operators that would launch kernels, and collectives, are counted.

Its limits: no streams, no memory, no speed. What only a kernel can refuse (a dtype, an index out of range) is not seen.
Install it (`install()`) before the first backward pass of the process: torch makes its device threads then. So it
runs in a process of its own, see tests/gpu/measure.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import pipeline.engines.ddp

ROOT = Path(__file__).parents[1]
CUDA, META = torch.device("cuda", 0), torch.device("meta")
aten = torch.ops.aten
# They read a size or a value from the device before they return.
SYNCHRONISING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::bincount", "aten::multinomial",
    "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::linalg_cholesky_ex", "aten::linalg_inv_ex", "aten::_linalg_eigh", "aten::_linalg_svd", "aten::_linalg_solve_ex",
}  # fmt: skip
NO_KERNEL = {"aten::_local_scalar_dense", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::lift_fresh"}  # fmt: skip
TAKES_BOTH = {"aten::copy_", "aten::_to_copy"}  # host and device tensors


def install() -> None:
    """Give torch a device guard for CUDA; a CPU build has none, and autograd asks for one.

    torch sets a guard that does nothing where it finds one that counts no devices. So one is put there first: an object
    all of whose virtual functions return 0.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[1]:
        return
    zero = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: 0)
    functions = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 64)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(functions))
    guards[1] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    assert guards[1] != ctypes.addressof(guard), "torch did not set its guard"


class DeviceTensor(Tensor):
    """A tensor on the fake device; `host` holds its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> DeviceTensor:
        out: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype,
            device=CUDA, dispatch_device=True,
        )  # fmt: skip
        out.host = real
        return out

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"on {CUDA}: {self.host!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert FakeCuda.now is not None, "a tensor of the fake device is used after the device has gone"
        return FakeCuda.now.run(func, args, kwargs or {})


@dataclass
class Counts:
    """What happened in one window of time."""

    name: str = ""
    operators: int = 0
    syncs: Counter[str] = field(default_factory=Counter)  # by the function that waits
    collectives: int = 0  # of device tensors
    host_collectives: int = 0
    called: Counter[str] = field(default_factory=Counter)  # operators by name


class FakeCuda(TorchDispatchMode):
    """The device. `counts` is the open window; `windows` are the closed ones."""

    now: FakeCuda | None = None

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.windows: list[Counts] = []
        self.pinned: dict[int, Tensor] = {}  # by the address of their storage; kept, so that no address is used twice
        self.backward = 0
        self._patches = contextlib.ExitStack()

    def mark(self, name: str = "") -> None:
        """Close the window and open the next."""
        self.windows.append(self.counts)
        self.counts = Counts(name)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        counts, self.counts = self.counts, Counts()
        try:
            yield
        finally:
            self.counts = counts

    # -- entering ------------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeCuda:
        install()
        assert FakeCuda.now is None, "there is one fake device at a time"
        FakeCuda.now = self
        for where, name, value in self._replaced():
            self._patches.enter_context(mock.patch.object(where, name, value, create=True))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is a copy we see
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        self._patches.close()
        FakeCuda.now = None

    def _replaced(self) -> list[tuple[Any, str, Any]]:
        """What asks the driver, and what asks for the type torch.Tensor itself."""
        run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def engine(*args: Any, **kwargs: Any) -> Any:
            # The engine would queue work of CUDA tensors for a device thread and ask the driver for streams. While it runs,
            # our tensors tell C++ that they are meta tensors, whose work it does at once. Python still sees cuda:0.
            self.backward += 1
            try:
                return run_backward(*args, **kwargs)
            finally:
                self.backward -= 1

        return [
            (torch.autograd, "_engine_run_backward", engine),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "device_count", lambda: 8),
            (torch.cuda, "get_device_name", lambda *_: "fake"),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "synchronize", lambda *_: self.synchronised()),
            (torch.cuda, "Event", Event),
            (torch.nn.utils.clip_grad, "_has_foreach_support", lambda tensors, device: device.type == "cuda"),
        ]

    # -- operators -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:
            return META if self.backward else CUDA if isinstance(args[0], DeviceTensor) else torch.device("cpu")
        tensors = list(_tensors((args, kwargs.values())))
        name, on_device = func._schema.name, any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        collective = name.startswith("c10d::")
        if collective and on_device:
            self.counts.collectives += 1
        elif collective:
            self.counts.host_collectives += 1
        if not on_device and not self._is_here(kwargs.get("device")):
            return self._on_host(func, name, args, kwargs)
        self._check_devices(name, tensors)
        to_host = kwargs.get("device") is not None and not self._is_here(kwargs["device"])
        if self._synchronises(name, args, kwargs, to_host):
            self.synchronised()
        if not (_is_view(func) or name in NO_KERNEL or collective):
            self.counts.operators += 1
            self.counts.called[name] += 1
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        out = func(*_map(_host, args), **_map(_host, kwargs))
        if to_host:
            return out
        if torch.Tag.inplace_view in func.tags:  # the shape of an argument changes, not its numbers
            with no_dispatch():
                func(*args, **kwargs)
            return args[0]
        known = {id(_host(tensor)): tensor for tensor in tensors}  # an argument that was changed in place
        assert all(tensor.shape == _host(tensor).shape for tensor in tensors), f"{func} changes a shape: not supported"
        return _map(lambda tensor: known[id(tensor)] if id(tensor) in known else DeviceTensor(tensor), out)

    def _is_here(self, device: Any) -> bool:
        """Whether a device is this one; see `engine` for its other name."""
        kind = device is not None and torch.device(device).type
        return kind == "cuda" or (kind == "meta" and self.backward > 0)

    def _on_host(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        pin = name == "aten::_pin_memory" or kwargs.pop("pin_memory", False)
        if name == "aten::is_pinned":
            return self._is_pinned(args[0])
        out = args[0].clone() if name == "aten::_pin_memory" else func(*args, **kwargs)
        if pin:
            self.pinned[out.untyped_storage().data_ptr()] = out
        return out

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def _check_devices(self, name: str, tensors: list[Tensor]) -> None:
        """A host tensor without dimensions is a number to a kernel; no other may stand beside one of the device."""
        if name in TAKES_BOTH:
            return
        host = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
            host = [] if isinstance(tensors[0], DeviceTensor) else host  # indices may be on the host
        changes_host = name.endswith("_") and any(tensors[0] is tensor for tensor in host)
        if changes_host or any(tensor.ndim for tensor in host):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in host)
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got {CUDA} and cpu (shapes on cpu: {shapes})."
            )

    # -- counting ------------------------------------------------------------------------------------------------

    def _synchronises(self, name: str, args: Any, kwargs: dict[str, Any], to_host: bool) -> bool:
        if name in SYNCHRONISING or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
            return True
        if name == "aten::_to_copy":
            if isinstance(args[0], DeviceTensor):  # torch takes pinned memory for an asynchronous copy to the host
                return to_host and not kwargs.get("non_blocking")
            return not (kwargs.get("non_blocking") and self._is_pinned(args[0]))
        if name == "aten::copy_":
            into, source = args[0], args[1]
            if isinstance(into, DeviceTensor) and isinstance(source, DeviceTensor):
                return False
            host = source if isinstance(into, DeviceTensor) else into
            asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            return not (asynchronous and self._is_pinned(host))
        if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
            return _index_synchronises(name, args)
        return False

    def synchronised(self) -> None:
        self.counts.syncs[_place()] += 1


class Event:
    """Marks a place in the queue of the device, whose work here is always done."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in the arguments of an operator."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple) or type(value).__name__ == "dict_values":
            yield from _tensors(value)


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same value with `function` of its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_map(function, part) for part in value])
    if isinstance(value, dict):
        return {key: _map(function, part) for key, part in value.items()}
    return value


def _host(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, DeviceTensor) else tensor


@cache
def _is_view(func: Any) -> bool:
    """Returns an alias of an argument and writes nothing: no kernel."""
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _index_synchronises(name: str, args: Any) -> bool:
    """A mask becomes a list of positions, whose length the host must know; an index on the host is copied."""
    indices = [index for index in args[1] if index is not None]
    if any(not isinstance(index, DeviceTensor) for index in indices):
        return True
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if not masks or name == "aten::index":
        return bool(masks)
    value, accumulate = args[2], len(args) > 3 and args[3]
    one_number = value.numel() == 1 and not isinstance(value, DeviceTensor)
    return bool(accumulate or not one_number or len(masks) < len(indices))  # else torch fills by mask


def _place() -> str:
    """The function of ours that is running, and the module of torch it called if that is more than an operator."""
    inner, frame = "", sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.parts[len(ROOT.parts)] in ("pipeline", "shards", "launch"):
            return f"{file.relative_to(ROOT)} {frame.f_code.co_qualname}" + (f" ({inner})" if inner else "")
        if not inner and file.parent.parent.name in ("nn", "torch") and file.parent.name in ("modules", "optim", "amp"):
            inner = f"torch {file.name} {frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return inner or "outside the project"


@contextlib.contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """This process is one rank of several: a sum over ranks is its own part, gathered rows are copies of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(pipeline.engines.ddp, "DistributedDataParallel", FakeDDP):
            yield
    finally:
        dist.destroy_process_group()


class FakeDDP(DistributedDataParallel):
    """Sends its buckets itself: DDP waits for a result that the work of a fake group does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, _send_bucket)
        self.logger = mock.Mock()  # the real one asks for CUDA's timer
        self.calls = 0

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """In its second forward pass DDP sorts its buckets anew; as that happens once, it is no part of a step's cost."""
        self.calls += 1
        with FakeCuda.now.uncounted() if FakeCuda.now and self.calls == 2 else contextlib.nullcontext():
            return super()._pre_forward(*args, **kwargs)


def _send_bucket(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    dist.all_reduce(bucket.buffer())
    sent: torch.futures.Future[Tensor] = torch.futures.Future()
    sent.set_result(bucket.buffer())
    return sent
