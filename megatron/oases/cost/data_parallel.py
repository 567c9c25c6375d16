"""What data parallelism sends: gradients in Megatron's buckets, parameters where the optimizer is distributed.

And what is summed within the tensor-parallel group besides.
"""

from collections import Counter
from collections.abc import Iterable

from megatron.oases.cost.memory import stage_parameters, word_embedding_parameters
from megatron.oases.cost.model import Collective, CostModel, Group
from megatron.oases.cost.simulator import DataParallel
from megatron.oases.cost.workload import Workload
from megatron.oases.schedule import Layout, Part

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
    parameters = sum(workload.model.replicated_parameters(part.role) for part in layout.chain)
    return cost.collective_ms(Collective.ALL_REDUCE, workload.tensor_group, parameters * workload.gradient_bytes)


def copies_ms(cost: CostModel, workload: Workload, parts: Iterable[Part]) -> float:
    """Weight gradients of blocks with sub-groups are summed over these, after the data-parallel reduction.

    Where the optimizer is distributed, each rank's shard of them.
    """
    parameters: Counter[int] = Counter()
    for part in parts:
        count = workload.model.parameters(part.role, degree=workload.degree_of(part))
        if workload.sequence_parallel:  # else they would count twice
            count -= workload.model.replicated_parameters(part.role)
        parameters[part.sub_groups] += count
    sharing = workload.data if workload.distributed_optimizer else 1
    return sum(
        cost.collective_ms(
            Collective.ALL_REDUCE,
            Group(sub_groups, stride=workload.tensor // sub_groups),
            -(-count // sharing) * workload.gradient_bytes,
        )
        for sub_groups, count in parameters.items()
        if sub_groups > 1
    )


def tied_embedding_ms(cost: CostModel, workload: Workload) -> float:
    """The first and the last pipeline stage sum the gradient of a weight that both have."""
    if workload.pipeline == 1 or not workload.model.tied_embeddings:
        return 0.0
    ends = Group(2, stride=workload.tensor * workload.data * (workload.pipeline - 1))
    size_bytes = word_embedding_parameters(workload) * workload.gradient_bytes
    return cost.collective_ms(Collective.ALL_REDUCE, ends, size_bytes)


def overlaps_backward(workload: Workload) -> bool:
    """Whether most of the reduction has a bucket that is ready before the last backward pass ends."""
    few = stage_parameters(workload, 0) < 2 * _bucket_parameters(workload)
    return workload.overlap_grad_reduce and workload.pipeline == 1 and not few


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


def _bucket_parameters(workload: Workload) -> int:
    return max(_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK * workload.data)


def _buckets(workload: Workload, layout: Layout, stage: int) -> list[tuple[frozenset[int], int]]:
    """(parts of the chain, parameters), in the order of backward. All stages but the first have one for all."""
    limit = _bucket_parameters(workload) if stage == 0 else None
    buckets, places, count = [], [], 0
    for place in range(len(layout.chain) - 1, -1, -1):
        places.append(place)
        part = layout.chain[place]
        count += workload.model.parameters(part.role, degree=workload.degree_of(part))
        if limit is not None and count >= limit:
            buckets.append((frozenset(places), count))
            places, count = [], 0
    if places:
        buckets.append((frozenset(places), count))
    missing = stage_parameters(workload, stage) - sum(count for _, count in buckets)  # a copy of tied embeddings
    places, count = buckets[-1]
    return [*buckets[:-1], (places, count + missing)]
