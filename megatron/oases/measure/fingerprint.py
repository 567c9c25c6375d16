"""What a profile holds for: model, layout, options, device, software."""

import os
from argparse import Namespace

import psutil
import torch

from megatron.oases.available import Available
from megatron.oases.cost.options import options_of
from megatron.oases.cost.profile_file import Device, Fingerprint, Layout, Software
from megatron.oases.cost.workload import ModelShape
from megatron.oases.report.machine import describe_machine
from megatron.oases.report.runs import REPOSITORY


def fingerprint_of(args: Namespace, device: str) -> Fingerprint:
    """The fingerprint of the run that Megatron's validated arguments describe, on `device` (cuda or cpu)."""
    machine = describe_machine(REPOSITORY)
    return Fingerprint(
        model=ModelShape.from_args(args),
        layout=Layout(
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            data=args.data_parallel_size,
            micro_batch=args.micro_batch_size,
            micro_batches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            sequence_parallel=args.sequence_parallel,
            hidden_dropout=args.hidden_dropout > 0,
            attention_dropout=args.attention_dropout > 0,
        ),
        options=options_of(args),
        device=_cuda_device() if device == "cuda" else _host_device(machine["cpu"]),
        software=Software(
            torch=machine["torch"],
            megatron_core=machine["megatron_core"],
            python=machine["python"],
            backend=args.distributed_backend,
            commit=machine["commit"],
        ),
        available=Available.detect(device),
    )


def _cuda_device() -> Device:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(name=properties.name, threads=0, memory_bytes=properties.total_memory)


def _host_device(cpu: str) -> Device:
    cores = len(os.sched_getaffinity(0))
    return Device(
        name=f"{cpu}, {cores} cores", threads=torch.get_num_threads(), memory_bytes=psutil.virtual_memory().total
    )
