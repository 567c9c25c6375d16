"""What data parallelism sends: gradients in Megatron's buckets, parameters where the optimizer is distributed."""

from megatron.oases.cost.memory import stage_parameters
from megatron.oases.cost.model import Collective, CostModel
from megatron.oases.cost.simulator import DataParallel
from megatron.oases.cost.workload import Workload
from megatron.oases.schedule import Layout, Role

# Megatron's default (DistributedDataParallel): a bucket is closed once it has this many parameters.
_BUCKET_PARAMETERS = 40_000_000
_BUCKET_PARAMETERS_PER_RANK = 1_000_000


def reduce_ms(cost: CostModel, workload: Workload, parameters: int) -> float:
    """The gradients of so many parameters over the data-parallel group."""
    if workload.data == 1:
        return 0.0
    collective = Collective.REDUCE_SCATTER if workload.distributed_optimizer else Collective.ALL_REDUCE
    return cost.collective_ms(collective, workload.data_group, parameters * workload.gradient_bytes)


def gather_ms(cost: CostModel, workload: Workload, parameters: int) -> float:
    """So many parameters, each updated by one rank of the data-parallel group."""
    if workload.data == 1 or not workload.distributed_optimizer:
        return 0.0
    size_bytes = parameters * workload.model.element_bytes
    return cost.collective_ms(Collective.ALL_GATHER, workload.data_group, size_bytes)


def norm_gradients_ms(cost: CostModel, workload: Workload, layout: Layout) -> float:
    """With sequence parallelism each rank has seen its part of the sequence only, so gradients of norms are summed."""
    if not workload.sequence_parallel or workload.tensor == 1:
        return 0.0
    model = workload.model
    of_norm = model.hidden_size * (1 if model.rms_norm else 2)
    of_bias = model.hidden_size if model.bias else 0  # of the row-parallel linear
    norms = [part for part in layout.chain if part.role is not Role.EMBEDDING]
    parameters = sum(of_norm + of_bias * part.is_block for part in norms)
    return cost.collective_ms(Collective.ALL_REDUCE, workload.tensor_group, parameters * workload.gradient_bytes)


def beside_first_forward(cost: CostModel, workload: Workload, layout: Layout, stage: int) -> DataParallel:
    """Gathers of parameters beside the first forward pass (`--overlap-param-gather`)."""
    if workload.data == 1 or not workload.overlap_param_gather:
        return DataParallel()
    buckets = reversed(_buckets(workload, layout, stage))
    return DataParallel(arriving=tuple((places, gather_ms(cost, workload, count)) for places, count in buckets))


def beside_last_backward(cost: CostModel, workload: Workload, layout: Layout, stage: int) -> DataParallel:
    """Reductions of gradients beside the last backward pass (`--overlap-grad-reduce`)."""
    if workload.data == 1 or not workload.overlap_grad_reduce:
        return DataParallel()
    buckets = _buckets(workload, layout, stage)
    return DataParallel(leaving=tuple((places, reduce_ms(cost, workload, count)) for places, count in buckets))


def _buckets(workload: Workload, layout: Layout, stage: int) -> list[tuple[frozenset[int], int]]:
    """(parts of the chain, parameters), in the order of backward. All stages but the first have one for all."""
    limit = max(_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK * workload.data) if stage == 0 else None
    buckets, places, count = [], [], 0
    for place in range(len(layout.chain) - 1, -1, -1):
        places.append(place)
        count += workload.model.parameters(layout.chain[place].role, degree=workload.tensor)
        if limit is not None and count >= limit:
            buckets.append((frozenset(places), count))
            places, count = [], 0
    if places:
        buckets.append((frozenset(places), count))
    missing = stage_parameters(workload, stage) - sum(count for _, count in buckets)  # a copy of tied embeddings
    places, count = buckets[-1]
    return [*buckets[:-1], (places, count + missing)]
