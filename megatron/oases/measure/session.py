"""A small model of the user's shape in Megatron's own training step, computation alone, with every operation timed.

What runs is what will run: Megatron builds the model, its gradient buffers and its optimizer, and its `train_step`
drives the executor. Only the number of layers is smaller, and the tensor-parallel collectives are left out.
"""

import copy
import gc
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches, reconfigure_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from megatron.training import training
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron.oases import gpt
from megatron.oases.arguments import OasesConfig
from megatron.oases.measure.clock import Clock, Stopwatch
from megatron.oases.measure.peak import reset_peak
from megatron.oases.measure.small_run import changes, random_batches, regroup
from megatron.oases.report.alone import compute_only
from megatron.oases.runtime import attach_schedule
from megatron.oases.schedule import Idea, Operation, Part


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One training step, in ms.

    Args:
        operations: each with its time; those that start collectives are among them.
        optimizer_ms: zeroing of gradients, clipping, Adam; without the gathering of parameters.
        rest_ms: what is left of the step beside both and beside data-parallel communication. In a vanilla session that
            is the whole forward and backward pass, too.
    """

    operations: list[tuple[Operation, float]]
    optimizer_ms: float
    rest_ms: float


class Session:
    """The model at one TP degree, on all ranks at once: `world / degree` groups, each with a model of its own.

    Args:
        args: Megatron's arguments, which the session changes and which Megatron reads from everywhere.
        base: those arguments as the user gave them.
        config: the Oases flags.
        degree: TP degree.
        layers: number of transformer layers.
        kept: whether blocks keep their graphs. Otherwise they are recomputed.
        vanilla: whether Megatron runs the model itself. Then there are no operations to be timed.
        clock: of the device.
    """

    def __init__(
        self,
        args: Namespace,
        base: Namespace,
        config: OasesConfig,
        *,
        degree: int,
        layers: int,
        kept: bool,
        vanilla: bool,
        clock: Clock,
    ):
        self.degree, self.layers, self.kept, self.vanilla = degree, layers, kept, vanilla
        self.stopwatch = Stopwatch(clock)
        self.sequence_parallel = base.sequence_parallel and degree > 1
        self._args = args
        vars(args).update(vars(copy.copy(base)))
        vars(args).update(changes(base, degree=degree, layers=layers, kept=kept))
        regroup(args, degree)
        reset_peak()
        model = gpt.model_config(args, replace(config, schedule="vanilla", sub_batches=1))
        if not vanilla:
            model.pre_wrap_hooks.append(self._attach)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            self._model, self._optimizer, self._scheduler = training.setup_model_and_optimizer(
                ModelType.encoder_or_decoder,
                cfg_container=pretrain_cfg_container_from_args(args, model),
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
        for chunk in self._model:
            chunk.train()
            chunk.zero_grad_buffer = self.stopwatch.wrap("optimizer", chunk.zero_grad_buffer)
            for buffers in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # The distributed optimizer's step ends with it; as a collective it is measured apart.
                buffers.start_param_sync = self.stopwatch.wrap("gather", buffers.start_param_sync)
        self._optimizer.step = self._together(self.stopwatch.wrap("optimizer", self._optimizer.step))
        self._forward_step = self._together(gpt.forward_step)
        self._config = get_model_config(self._model[0])
        self._config.grad_scale_func = self._optimizer.scale_loss
        finalize = self._config.finalize_model_grads_func or finalize_model_grads
        self._config.finalize_model_grads_func = self.stopwatch.wrap("finalize", finalize)
        self._iteration = 0

    def _attach(self, chunks: list) -> list:
        (chunk,) = chunks
        self._stage = attach_schedule(
            chunk,
            sub_batches=1,
            micro_batches=get_num_microbatches,
            # The last layer shall be recomputed like the others, so that one that is recomputed can be timed.
            without=frozenset({Idea.KEEP_LAST_LAYER}),
            observer=self.stopwatch,
        )
        return chunks

    @property
    def chain(self) -> tuple[Part, ...]:
        return self._stage.schedule.layout.chain

    @property
    def parameters_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._model[0].parameters())

    @property
    def optimized_parameters(self) -> int:
        """Number of parameters that this rank's optimizer updates: a share of them with the distributed optimizer."""
        return sum(parameter.numel() for group in self._optimizer.param_groups for parameter in group["params"])

    def steps(self, count: int, *, samples: int, micro_batches: int = 1) -> Iterator[StepTimes]:
        """Runs `count` training steps, which all ranks begin together.

        Args:
            count: number of steps.
            samples: of a micro-batch.
            micro_batches: of one rank, in a step.
        """
        args = self._args
        args.micro_batch_size = samples
        args.global_batch_size = samples * micro_batches * args.data_parallel_size
        reconfigure_num_microbatches_calculator(
            rank=args.rank,
            global_batch_size=args.global_batch_size,
            micro_batch_size=samples,
            data_parallel_size=args.data_parallel_size,
        )
        iterator = RerunDataIterator(random_batches(args))
        step = training.train_step
        if self.degree > 1:
            step = compute_only(step, parallel_state.get_tensor_model_parallel_group)
        for _ in range(count):
            dist.barrier()
            self.stopwatch.clock.synchronize()
            with self.stopwatch("step"):
                step(
                    self._forward_step,
                    iterator,
                    self._model,
                    self._optimizer,
                    self._scheduler,
                    self._config,
                    get_forward_backward_func(),
                    iteration=self._iteration,
                )
            self._iteration += 1
            yield step_times(self.stopwatch.take())

    def _together(self, function: Callable) -> Callable:
        """The function, begun by all ranks at once.

        Without tensor-parallel collectives the ranks drift apart. Where the step itself makes them meet, as when a
        batch is handed on or gradient norms are summed, the wait would be taken for work.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.stopwatch("wait"):
                dist.barrier()
            return function(*args, **kwargs)

        return run

    def close(self) -> None:
        """Gives the memory back."""
        self._model = self._optimizer = self._scheduler = self._config = self._stage = None
        self.stopwatch = None
        gc.collect()
        torch.cuda.empty_cache()


def step_times(spans: list[tuple[object, float]]) -> StepTimes:
    """From (operation or name, ms). A gathering of parameters lies within the optimizer's step."""
    named = {"step": 0.0, "optimizer": 0.0, "gather": 0.0, "finalize": 0.0, "wait": 0.0}
    operations = []
    for key, ms in spans:
        if isinstance(key, Operation):
            operations.append((key, ms))
        else:
            named[key] += ms
    apart_ms = named["optimizer"] + named["finalize"] + named["wait"]
    rest_ms = named["step"] - apart_ms - sum(ms for _, ms in operations)
    optimizer_ms = named["optimizer"] - named["gather"]
    return StepTimes(operations=operations, optimizer_ms=optimizer_ms, rest_ms=rest_ms)
