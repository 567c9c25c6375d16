"""A profile made up for tests: times that follow from formulas, so that a test knows the answer."""

import dataclasses

from megatron.oases.available import Available
from megatron.oases.cost.model import Collective, Group
from megatron.oases.cost.profile_file import (
    VERSION,
    CollectiveFit,
    CollectivePoint,
    CollectiveSeries,
    ContentionCell,
    Device,
    Fingerprint,
    HeldOut,
    Layout,
    MemoryCell,
    OperationCell,
    Optimizer,
    OptimizerPoint,
    Overhead,
    Profile,
    Software,
    VanillaCell,
)
from megatron.oases.cost.workload import Workload
from megatron.oases.schedule import Kind, Role
from tests.unit import stand_in_cost
from tests.unit.stand_in_cost import shape

MODEL = shape(layers=4, hidden_size=64, ffn_hidden_size=256, head_size=16, sequence=32, padded_vocabulary=256)
OPTIONS = {"optimizer": "adam", "qk_layernorm": "False"}
LATENCY_MS, GBPS = 0.5, 1.0
SAMPLES = (1, 2, 4)
OPERATIONS = ((Kind.FORWARD, Role.MLP), (Kind.JOIN, Role.MLP), (Kind.DGRAD, Role.ATTENTION))


def workload(**changes) -> Workload:
    """One that the profile was taken for."""
    fields = dict(model=MODEL, micro_batch=4, micro_batches=2, recompute="full")
    return stand_in_cost.workload(**{**fields, **changes})


def operation_ms(degree: int, samples: int, *, kept: bool) -> float:
    return (1.0 + 2.0 * samples) / degree * (1.5 if kept else 1.0)


def collective_ms(size_bytes: int) -> float:
    return LATENCY_MS + size_bytes * 8 / (GBPS * 1e6)


def cell(samples: int, *, kind=Kind.FORWARD, role=Role.MLP, degree=2, kept=False, **changes) -> OperationCell:
    fields = dict(median_ms=operation_ms(degree, samples, kept=kept), spread_ms=0.1, repeats=10, missing=None)
    return OperationCell(
        kind=kind, role=role, degree=degree, samples=samples, kept=kept, **{**fields, **changes}
    )


def profile(**changes) -> Profile:
    sizes = [4096 * 4**i for i in range(5)]
    points = tuple(
        CollectivePoint(size_bytes=size, median_ms=collective_ms(size), spread_ms=0.0, repeats=5) for size in sizes
    )
    fields = dict(
        version=VERSION,
        fingerprint=Fingerprint(
            model=MODEL,
            layout=Layout(
                tensor=2,
                pipeline=1,
                data=1,
                micro_batch=4,
                micro_batches=2,
                sequence_parallel=False,
                hidden_dropout=False,
                attention_dropout=False,
            ),
            options=OPTIONS,
            device=Device(name="a processor", threads=1, memory_bytes=2**33),
            software=Software(torch="1.0", megatron_core="0.1", python="3.12", backend="gloo", commit=None),
            available=Available.torch_alone("cpu"),
        ),
        date="2026-01-01T00:00:00+00:00",
        command="oases_profiler.py --output profile.json -- --num-layers 4",
        operations=tuple(
            cell(samples, kind=kind, role=role, degree=degree, kept=kept)
            for kind, role in OPERATIONS
            for degree in (1, 2)
            for kept in (False, True)
            for samples in SAMPLES
        ),
        collectives=(
            CollectiveSeries(
                collective=Collective.ALL_REDUCE,
                group_size=2,
                stride=1,
                points=points,
                fit=CollectiveFit(latency_ms=LATENCY_MS, gbps=GBPS, residual=0.0),
                held_out_error=0.01,
            ),
            CollectiveSeries(
                collective=Collective.ALL_TO_ALL,
                group_size=2,
                stride=1,
                points=(),
                fit=None,
                held_out_error=None,
                missing="gloo: cannot do it",
            ),
        ),
        contention=(ContentionCell(group_size=2, stride=1, compute=1.2, communication=1.1),),
        vanilla=(
            VanillaCell(degree=2, samples=4, kept=False, factor=1.25),
            VanillaCell(degree=2, samples=4, kept=True, factor=None, missing="out of memory"),
        ),
        optimizer=Optimizer(
            points=(OptimizerPoint(parameters=10**6, median_ms=6.0, spread_ms=0.1, repeats=10),),
            fixed_ms=1.0,
            ns_per_parameter=5.0,
            residual=0.0,
        ),
        overhead=Overhead(fixed_ms=3.0, per_micro_batch_ms=2.0),
        memory=(MemoryCell(degree=2, layers=2, kept=False, samples=4, parameters_bytes=10, peak_bytes=100),),
        held_out=HeldOut(operations_median=0.01, operations_worst=0.02),
    )
    return Profile(**{**fields, **changes})


def with_operations(*cells: OperationCell) -> Profile:
    return dataclasses.replace(profile(), operations=cells)


GROUP = Group(2)
