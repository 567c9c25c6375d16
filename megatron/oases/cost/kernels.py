"""How long one kernel takes on a device, from its shape alone.

A matrix product [m, k] x [k, n] is made of tiles. Filling the pipeline of a tile costs as much as PIPELINE_DEPTH more
terms of its sum, and the device's units do not all finish at the same time, which costs a share of one more tile each:

    2 (k + PIPELINE_DEPTH) (m n + multiprocessors TILE^2 LAST_WAVE) / achievable FLOP/s

or, if that takes longer, reading and writing its matrices. So small and skinny products reach less than large ones, and
a device with more units needs larger ones. Elementwise kernels take their traffic over the memory's bandwidth.

The host starts kernels ahead of their turn. A sequence of them takes what they take, or what starting them takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.oases.cost.cluster import Device

# Both were fitted on published times of GPT blocks on RTX 3090 (TF32; profile data of the repository of Li et al., TPDS
# 2025), and so are a GPU's.
PIPELINE_DEPTH = 128
LAST_WAVE = 0.46
TILE = 128  # rows and columns that one unit computes, the largest common tile of vendors' libraries


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels of one device in one dtype.

    Args:
        device: the device.
        dtype: of matrix products, as the cluster file names it.
        element_bytes: of an activation or weight.
    """

    device: Device
    dtype: str
    element_bytes: int

    def matmul_ms(self, m: float, n: float, k: float, *, batch: float = 1, accumulates: bool = False) -> float:
        """A matrix product.

        Args:
            m, n, k: its shape.
            batch: how many of them at once.
            accumulates: whether it adds to an fp32 matrix, as a weight gradient does.
        """
        units = self.device.multiprocessors
        operations = 2 * (k + PIPELINE_DEPTH) * (batch * m * n + units * TILE**2 * LAST_WAVE)
        computing_ms = operations / (self.device.achievable_tflops[self.dtype] * 1e9)
        output_bytes = 8 if accumulates else self.element_bytes
        traffic_bytes = batch * ((m * k + k * n) * self.element_bytes + m * n * output_bytes)
        return max(computing_ms, self.traffic_ms(traffic_bytes))

    def elementwise_ms(self, elements: float, passes: float) -> float:
        """A kernel that reads or writes each of `elements` activations `passes` times in all."""
        return self.traffic_ms(elements * passes * self.element_bytes)

    def traffic_ms(self, traffic_bytes: float) -> float:
        """Reading or writing memory, without computing."""
        return traffic_bytes / (self.device.memory_gb_per_s * self.device.memory_efficiency * 1e6)

    def sequence_ms(self, kernels_ms: Sequence[float]) -> float:
        """Kernels one after the other."""
        return max(sum(kernels_ms), len(kernels_ms) * self.device.launch_us / 1e3)
