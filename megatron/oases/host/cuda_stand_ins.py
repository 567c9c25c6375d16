"""What the CPU answers where Megatron calls `torch.cuda`.

Only calls that fail without a GPU are replaced, and only with what is true here: there is one device, work is
finished when a call returns (so streams and events have nothing to wait for), and memory is the process's own.
`is_available()` and `device_count()` keep telling the truth.
"""

import resource
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from megatron.oases.host.replacements import Replacements


class HostStream:
    """A queue of work that is always empty: on the CPU every call has finished when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        event = event or HostEvent()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class HostEvent:
    """A time stamp of the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def elapsed_time(self, later: "HostEvent") -> float:
        return (later._time_s - self._time_s) * 1e3

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _resident_bytes(*_: Any, **__: Any) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident_bytes(*_: Any, **__: Any) -> int:
    # The kernel updates its maximum now and then only.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident_bytes())


def _memory_stats(*_: Any, **__: Any) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": _resident_bytes(),
        "allocated_bytes.all.peak": _peak_resident_bytes(),
        "reserved_bytes.all.current": _resident_bytes(),
        "reserved_bytes.all.peak": _peak_resident_bytes(),
        "allocation.all.current": 0,
        "num_alloc_retries": 0,
    }


def _device_properties(*_: Any, **__: Any) -> SimpleNamespace:
    memory_bytes = psutil.virtual_memory().total
    return SimpleNamespace(name="cpu", major=0, minor=0, total_memory=memory_bytes, multi_processor_count=1)


def replace_cuda_calls(replacements: Replacements) -> None:
    """Puts the stand-ins into `torch.cuda`, and lets `.cuda()` of tensors, and so of modules, do nothing."""
    nothing = lambda *_, **__: None  # noqa: E731
    stream = HostStream()
    stand_ins = {
        # A device instead of an index: Megatron passes it straight on as `device=`, also where no mode can see it.
        "current_device": lambda: torch.device("cpu"),
        "set_device": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "check_error": nothing,
        "Stream": HostStream,
        "Event": HostEvent,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": lambda *_, **__: nullcontext(),
        "set_stream": nothing,
        "device": lambda *_, **__: nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": _resident_bytes,
        "memory_reserved": _resident_bytes,
        "max_memory_allocated": _peak_resident_bytes,
        "max_memory_reserved": _peak_resident_bytes,
        "device_memory_used": _resident_bytes,
        "memory_stats": _memory_stats,
        "mem_get_info": lambda *_, **__: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        "reset_peak_memory_stats": nothing,
        "get_device_capability": lambda *_, **__: (0, 0),
        "get_device_properties": _device_properties,
        "get_device_name": lambda *_, **__: "cpu",
    }
    for name, stand_in in stand_ins.items():
        replacements.set(torch.cuda, name, stand_in)
    replacements.set(torch.cuda.nvtx, "range_push", nothing)
    replacements.set(torch.cuda.nvtx, "range_pop", nothing)
    replacements.set(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
