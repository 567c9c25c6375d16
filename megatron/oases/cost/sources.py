"""Where costs come from: a cluster file or a profile, each as the command line names it."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.oases.available import Available
from megatron.oases.cost.cluster import Cluster
from megatron.oases.cost.cluster_file import load_cluster
from megatron.oases.cost.model import CostModel
from megatron.oases.cost.options import options_of
from megatron.oases.cost.profile import load_profile_cost
from megatron.oases.cost.profile_file import read_profile
from megatron.oases.cost.roofline import RooflineCost
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import Workload
from megatron.oases.sizes import GIB


@dataclass(frozen=True, kw_only=True)
class CostSource:
    """Gives the cost model of a workload.

    Args:
        name: for titles.
        device: what one is called.
        backend: of the collectives: `gloo` between CPUs, `nccl` between GPUs.
        available: what the devices have for Megatron's defaults.
        memory_bytes: of a device; None where devices share the host's.
        degrees: TP degrees that the costs know; None for all.
        cost: from the workload, Megatron's arguments for it, and who orders it.
    """

    name: str
    device: str
    backend: str
    available: Available
    memory_bytes: int | None
    degrees: tuple[int, ...] | None
    cost: Callable[[Workload, Namespace, System], CostModel]

    @property
    def on_cpu(self) -> bool:
        """Then the host also sees when a collective has ended."""
        return self.backend == "gloo"

    @staticmethod
    def announcements(cost: CostModel) -> set[str]:
        """What the user has to know of how sure the costs are: one line each."""
        return set(getattr(cost, "announcements", ()))


def cluster_source(name_or_file: str, *, fp32_as: str = "fp32") -> CostSource:
    """A cluster file, or the name of a shipped one. Raises `UsageError`.

    `fp32_as`: how matrix products of fp32 tensors are computed: `fp32` or `tf32`.
    """
    return source_of(load_cluster(name_or_file), fp32_as=fp32_as)


def source_of(cluster: Cluster, *, fp32_as: str = "fp32") -> CostSource:
    """A cluster as `load_cluster` gives it. `fp32_as`: see `cluster_source`."""

    def cost(workload: Workload, args: Namespace, system: System) -> CostModel:
        dtype = "fp16" if args.fp16 else "bf16" if args.bf16 else fp32_as
        return RooflineCost(cluster, workload, dtype=dtype, clips_gradients=args.clip_grad > 0)

    # A cluster file does not say what is installed: torch is.
    on_gpu = cluster.backend == "nccl"
    return CostSource(
        name=f"cluster {cluster.name}, {cluster.backend}",
        device=cluster.device.name,
        backend=cluster.backend,
        available=Available.torch_alone("cuda" if on_gpu else "cpu"),
        memory_bytes=round(cluster.device.memory_gib * GIB),
        degrees=None,
        cost=cost,
    )


def profile_source(path: Path) -> CostSource:
    """A profile. Raises `UsageError`."""
    profile = read_profile(path)
    fingerprint = profile.fingerprint
    on_cpu = fingerprint.device.threads > 0

    def cost(workload: Workload, args: Namespace, system: System) -> CostModel:
        measured = load_profile_cost(path, workload, options_of(args))
        return measured.for_megatron(kept=workload.recompute == "none") if system.is_vanilla else measured

    return CostSource(
        name=f"profile {path}",
        device=fingerprint.device.name,
        backend=fingerprint.software.backend,
        available=fingerprint.available,
        memory_bytes=None if on_cpu else fingerprint.device.memory_bytes,
        degrees=tuple(sorted({cell.degree for cell in profile.operations})),
        cost=cost,
    )
