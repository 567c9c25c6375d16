"""The environment of a distributed run, completed where the launcher left it open."""

import os
import socket
import sys
from collections.abc import MutableMapping

_LOOPBACK = "127.0.0.1"


def complete_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets a plain `python` run one rank, and keeps a run on one machine off its network."""
    if "RANK" not in environment:
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        environment.setdefault("MASTER_ADDR", _LOOPBACK)
        environment.setdefault("MASTER_PORT", str(_free_port()))
    if _all_ranks_here(environment):
        _use_loopback(environment)
    # Before Blackwell Megatron refuses tensor parallelism without it, and FSDP with it. Read when CUDA starts.
    if not any("fsdp" in argument for argument in sys.argv):
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return probe.getsockname()[1]


def _all_ranks_here(environment: MutableMapping[str, str]) -> bool:
    return environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")


def _use_loopback(environment: MutableMapping[str, str]) -> None:
    """Gloo looks up the machine's own name to choose an interface; a name that does not resolve can hang it."""
    master = environment.get("MASTER_ADDR", "")
    # torchrun --standalone gives the machine's name.
    if master == "localhost" or master.startswith("127.") or master in (socket.gethostname(), socket.getfqdn()):
        environment["MASTER_ADDR"] = _LOOPBACK
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


def is_first_rank_of_another_server() -> bool:
    """True for the rank that has to speak for its server, when rank 0 is not on it and may see other files."""
    return os.environ.get("LOCAL_RANK") == "0" and os.environ.get("RANK", "0") != "0"
