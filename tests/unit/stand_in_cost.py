"""A cost model of a few numbers, so that a simulated time can be worked out by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.oases.cost.model import Collective, Contention, Group
from megatron.oases.cost.workload import ModelShape, Workload
from megatron.oases.schedule import Kind, Part, Role

# Of a block: forward and backward as long as each other and as a collective would be easy to tell apart.
BLOCK_MS = {
    Kind.FORWARD: 10.0,
    Kind.RECOMPUTE: 8.0,
    Kind.DGRAD: 10.0,
    Kind.WGRAD: 5.0,
    Kind.ROW_WGRAD: 5.0,
    Kind.JOIN: 1.0,
    Kind.NORM_GRAD: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class TableCost:
    """Implements `CostModel`.

    Args:
        block_ms: of one sample of an attention or MLP.
        ends_ms: of one sample of the embedding or the head.
        collective_ms_per_kib: of any collective.
        send_ms: from one stage to the next.
    """

    block_ms: Mapping[Kind, float] = field(default_factory=lambda: BLOCK_MS)
    ends_ms: Mapping[tuple[Role, Kind], float] = field(default_factory=dict)
    collective_ms_per_kib: float = 0.0
    data_ms_per_kib: float = 0.0
    send_ms: float = 0.0
    between: Contention = Contention()
    optimizer_ms_per_parameter: float = 0.0
    overhead_ms: float = 0.0

    def compute_ms(self, kind: Kind, part: Part, *, degree: int, samples: int, pieces: int = 1) -> float:
        role = part.role
        if kind in (Kind.ROW, Kind.COLUMN_GRAD):  # the first is what RECOMPUTE leaves out; the other is as long
            return samples * (self.block_ms[Kind.FORWARD] - self.block_ms[Kind.RECOMPUTE]) / pieces
        if role in (Role.ATTENTION, Role.MLP):
            return samples * self.block_ms.get(kind, 0.0)
        return samples * self.ends_ms.get((role, kind), 0.0)

    def collective_ms(self, collective: Collective, group: Group, size_bytes: int) -> float:
        if collective is Collective.SEND:
            return self.send_ms
        return size_bytes / 1024 * (self.collective_ms_per_kib if group.stride == 1 else self.data_ms_per_kib)

    def optimizer_ms(self, parameters: int) -> float:
        return self.optimizer_ms_per_parameter * parameters

    def iteration_overhead_ms(self, micro_batches: int) -> float:
        return self.overhead_ms

    def contention(self, group: Group) -> Contention:
        return self.between


def shape(**changes) -> ModelShape:
    """A GPT whose [s, b, h] of one sample is 1 KiB."""
    return ModelShape(
        **{
            "layers": 1,
            "hidden_size": 16,
            "ffn_hidden_size": 64,
            "heads": 4,
            "query_groups": 4,
            "head_size": 4,
            "sequence": 16,
            "padded_vocabulary": 32,
            "gated_mlp": False,
            "bias": True,
            "tied_embeddings": True,
            "learned_positions": True,
            "rms_norm": False,
            "stores_scores": True,
            "element_bytes": 4,
            **changes,
        }
    )


def workload(model: ModelShape | None = None, **changes) -> Workload:
    return Workload(
        **{
            "model": model or shape(),
            "tensor": 2,
            "pipeline": 1,
            "data": 1,
            "micro_batch": 2,
            "micro_batches": 1,
            "recompute": "none",
            "sub_batches": 2,
            **changes,
        }
    )
