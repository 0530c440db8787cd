"""A CUDA device for PyTorch builds without CUDA, played by host memory: for tests of code that drives a GPU.

    from tests import standin_cuda
    standin_cuda.install()   # before anything asks torch for a GPU

What it does and does not show is in README.md. `tests.standin_cuda.plugin` is the pytest plugin, and
`python -m tests.standin_cuda` runs any module or file on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NAME = "standin_cuda_ext"
SOURCES = tuple(Path(__file__).parent / "csrc" / name for name in ("runtime.cpp", "kernels.cpp"))
FLAGS = ("-O1", "-std=c++20", "-w")
COMPUTE_CAPABILITY = 90
"""Of the GPU that it says it is, `STANDIN_SM` otherwise: an H100's."""

_installed: Any = None


def unavailable() -> str | None:
    """Why the stand-in cannot be built here; `None` where it can."""
    if torch.version.cuda is not None and _installed is None:
        return "this PyTorch has CUDA itself"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler is installed"
    return None


def installed() -> Any:
    """What `install` returned in this process; `None` where nothing has called it."""
    return _installed


def build() -> Any:
    """The compiled extension. Compiles once for each text of its sources, with two jobs, into PyTorch's own cache of
    extensions (about a minute)."""
    from torch.utils.cpp_extension import get_default_build_root, load

    os.environ.setdefault("MAX_JOBS", "2")
    beside = str(Path(sys.executable).parent)  # ninja is installed beside the interpreter
    os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", "")])
    folder = Path(get_default_build_root()) / f"{NAME}_{_sources_hash()}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "building").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        finished = folder / "finished"
        if finished.exists():  # `load` would compile again for a checkout in another folder
            return _imported(folder / f"{NAME}.so")
        (folder / "lock").unlink(missing_ok=True)  # of a build that was killed, for which `load` would wait forever
        sources = [str(source) for source in SOURCES]
        extension = load(NAME, sources, extra_cflags=list(FLAGS), build_directory=str(folder))
        finished.touch()
        return extension


def _imported(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sources_hash() -> str:
    texts = [each.read_bytes() for each in sorted(SOURCES[0].parent.iterdir())]
    about = " ".join([torch.__version__, sys.version, *FLAGS]).encode()
    return hashlib.sha256(b"\0".join([about, *texts])).hexdigest()[:16]


def install() -> Any:
    """Make `torch.cuda` work in this process, for good. Returns the extension: `counters()`, `reset_counters()`,
    `violations(clear)`, `set_mode(mode, seed)`, `set_total(nbytes)`.

    Raises `RuntimeError` where it cannot be built.
    """
    global _installed
    if _installed is None:
        if reason := unavailable():
            raise RuntimeError(f"the stand-in CUDA device cannot be built: {reason}")
        from megatrain.engine import fused_cpu

        fused_cpu.register()  # so that these ops have CPU kernels, too
        extension = build()
        _bind(extension)
        extension.install()
        from tests.standin_cuda import attention

        attention.install()
        _installed = extension
    return _installed


def _bind(ext: Any) -> None:
    """Give `torch._C` what a build with CUDA has, as far as it is asked for; torch.cuda itself stays PyTorch's own."""
    cuda = torch.cuda
    for name, value in (_device_functions(ext) | _memory_functions(ext) | _classes(ext)).items():
        setattr(torch._C, name, value)
    torch._C._has_cuda = True
    torch.version.cuda = "12.8"
    cuda._cudart = torch._C._cudart  # type: ignore[attr-defined]
    cuda._get_device_properties = _properties(ext)
    cuda._CudaDeviceProperties = SimpleNamespace
    cuda._exchange_device = cuda._maybe_exchange_device = torch._C._cuda_exchangeDevice
    cuda._device_count_nvml = lambda: -1
    cuda._queued_calls.clear()  # checks that a real build makes when it is first used
    streams = importlib.reload(cuda.streams)  # its classes are subclasses of the two below
    for name in ("Stream", "Event", "ExternalStream"):
        setattr(cuda, name, getattr(streams, name))
    torch.backends.cuda.is_built = lambda: True
    _untyped_storages_on_the_device()


def _device_functions(ext: Any) -> dict[str, Any]:
    """Devices, streams and synchronisation."""
    owner = os.getpid()

    def initialise() -> None:
        if os.getpid() != owner:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        ext.initialise()
        torch.cuda.default_generators = tuple(ext.generator(index) for index in range(ext.device_count()))

    def current() -> int:
        return int(torch._C._accelerator_getDeviceIndex())

    def exchange(index: int) -> int:
        before = current()
        if index >= 0:
            torch._C._accelerator_setDeviceIndex(index)
        return before

    def current_stream(index: int) -> tuple[int, int, int]:
        found = torch.accelerator.current_stream(torch.device("cuda", index))
        return found.stream_id, found.device_index, 1

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        stream = torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        torch._C._accelerator_setStream(stream)
        torch._C._accelerator_setDeviceIndex(device_index)  # as CUDA does, and torch.accelerator does not

    mode = [0]

    def set_sync_debug(value: int) -> None:
        mode[0] = value
        ext.sync_debug(value)

    sm = os.environ.get("STANDIN_SM", COMPUTE_CAPABILITY)
    return {
        "_cuda_getDeviceCount": ext.device_count,
        "_cuda_init": initialise,
        "_cuda_isInBadFork": lambda: os.getpid() != owner,
        "_cuda_setDevice": torch._C._accelerator_setDeviceIndex,
        "_cuda_getDevice": current,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_synchronize": lambda: ext.synchronize(current()),
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": set_stream,
        "_cuda_getCurrentRawStream": lambda index: current_stream(index)[0],
        "_cuda_set_sync_debug_mode": set_sync_debug,
        "_cuda_get_sync_debug_mode": lambda: mode[0],
        "_cuda_getArchFlags": lambda: f"sm_{sm}",
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_getDriverVersion": lambda: 12080,
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_sleep": lambda cycles: None,
    }


def _memory_functions(ext: Any) -> dict[str, Any]:
    """The caching allocator's numbers, and page-locking."""
    lock = threading.Lock()

    def by_pool(now: int, peak: int) -> dict[str, dict[str, int]]:
        one = {"current": now, "peak": peak, "allocated": peak, "freed": peak - now}
        return {pool: dict(one) for pool in ("all", "large_pool", "small_pool")}

    def statistics(index: int) -> dict[str, Any]:
        with lock:
            allocated, peak, reserved = ext.allocated(index), ext.peak(index), ext.reserved(index)
        kinds = ("allocated_bytes", "active_bytes", "requested_bytes")
        found: dict[str, Any] = {kind: by_pool(allocated, peak) for kind in kinds}
        return found | {"reserved_bytes": by_pool(reserved, max(peak, reserved)), "num_alloc_retries": 0, "num_ooms": 0}

    class Error(int):
        success = 0

    runtime = SimpleNamespace(
        cudaError=Error,
        cudaGetErrorString=lambda code: f"error {int(code)} (stand-in)",
        cudaHostRegister=lambda pointer, nbytes, flags: Error(ext.host_register(pointer, nbytes)),
        cudaHostUnregister=lambda pointer: Error(ext.host_unregister(pointer)),
        cudaMemGetInfo=lambda index: (ext.total() - ext.reserved(index), ext.total()),
        cudaProfilerStart=lambda: Error(0),
        cudaProfilerStop=lambda: Error(0),
        cudaStreamCreate=lambda *_: Error(0),
    )
    return {
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": ext.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_emptyCache": ext.empty_cache,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cudart": runtime,
    }


def _classes(ext: Any) -> dict[str, Any]:
    """Base classes of `torch.cuda.Stream` and `torch.cuda.Event`."""

    class StreamBase(torch.Stream):
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int | None = None,
            device_index: int | None = None,
            device_type: int | None = None,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                device_index, stream_id = divmod(stream_ptr - ext.FIRST_STREAM, ext.STREAMS_PER_DEVICE)
            if stream_id is not None and device_index is not None:
                return torch.Stream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=1)
            return torch.Stream.__new__(
                cls, device=torch.device("cuda", torch.cuda.current_device()), priority=priority
            )

        cuda_stream = property(lambda self: self.native_handle if hasattr(self, "native_handle") else self.stream_id)
        priority = property(lambda self: 0)

    class EventBase(torch.Event):
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            return torch.Event.__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

        cuda_event = property(lambda self: self.event_id)

        def elapsed_time(self, end_event: Any) -> float:
            """Milliseconds; `torch.Event` has it for its own class only."""
            return float(ext.elapsed(self.event_id, end_event.event_id))

    return {"_CudaStreamBase": StreamBase, "_CudaEventBase": EventBase, "_CudaDeviceProperties": SimpleNamespace}


def _properties(ext: Any) -> Callable[[int], SimpleNamespace]:
    sm = int(os.environ.get("STANDIN_SM", COMPUTE_CAPABILITY))

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name="NVIDIA stand-in",
            major=sm // 10,
            minor=sm % 10,
            total_memory=ext.total(),
            multi_processor_count=132,
            is_integrated=0,
            is_multi_gpu_board=0,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            L2_cache_size=50 << 20,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472,
            gcnArchName="",
            uuid="standin",
            pci_bus_id=0,
            pci_device_id=index,
            pci_domain_id=0,
        )

    return properties


def _untyped_storages_on_the_device() -> None:
    """Have `torch.UntypedStorage(n, device="cuda")` ask the stand-in's allocator."""
    plain = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return plain(cls, *args, **kwargs)
        if torch.device(device).type != "cuda":
            return plain(cls, *args, device=device, **kwargs)
        nbytes = args[0] if args and isinstance(args[0], int) else 0
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]
