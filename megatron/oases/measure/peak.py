"""The most memory that was in use since a moment: of the GPU's allocator, or, on the CPU, of this process."""

import torch


def reset_peak() -> None:
    """From now on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        _reset_peak_resident()


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _peak_resident_bytes()


def _reset_peak_resident() -> None:
    """Linux keeps the peak of a process until it is told to begin anew."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return  # then the peak is that of the whole run


def _peak_resident_bytes() -> int:
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
