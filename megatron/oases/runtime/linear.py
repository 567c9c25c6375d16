"""Parallel linears under a schedule: no collective of their own, and the weight gradient apart from the input gradient.

torch's autograd computes both gradients of a linear at once. A schedule wants the input gradient at once, since the
next collective waits for it, and the weight gradient whenever there is nothing more urgent to do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(slots=True)
class LinearGradient:
    """What is needed to add one linear's weight gradient (and bias gradient) later.

    Shapes: weight [out, in], input [..., in], grad_output [..., out].
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    input: Tensor
    grad_output: Tensor
    row_parallel: bool
    fused: bool


@dataclass(slots=True)
class BiasGradient:
    """The gradient of a bias that is added after the collective: grad_output [..., out] summed to [out]."""

    bias: torch.nn.Parameter
    grad_output: Tensor
    row_parallel: ClassVar[bool] = True  # no other linear of a block leaves its bias to be added later


DeferredGradients = list[LinearGradient | BiasGradient]


class LinearScheduling:
    """Shared by the parallel linears of one part: whether a schedule runs them now, and how.

    Outside `owned` the linears are vanilla Megatron.
    """

    def __init__(self):
        self.active = False
        self._deferred: DeferredGradients | None = None
        self._leave_out_row_parallel = False
        self._decompose: Callable[[Tensor, Tensor], None] | None = None

    @contextmanager
    def owned(
        self,
        deferred: DeferredGradients | None = None,
        *,
        leave_out_row_parallel: bool = False,
        decompose: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Iterator[None]:
        """Runs the block's linears for a schedule.

        Args:
            deferred: receives, during backward, what the weight gradients need.
            leave_out_row_parallel: skips the row-parallel GEMM. Its output is not needed for any gradient, so
                recomputation can do without; what stands in for it has the right shape and no meaning.
            decompose: is given the input and the weight of the row-parallel linear, whose GEMM is left out then, to be
                run in pieces. So is that of the gradient of the column-parallel linear's input.
        """
        assert not self.active
        self.active, self._deferred, self._decompose = True, deferred, decompose
        self._leave_out_row_parallel = leave_out_row_parallel or decompose is not None
        try:
            yield
        finally:
            self.active, self._deferred, self._leave_out_row_parallel, self._decompose = False, None, False, None

    def __call__(
        self, input_: Tensor, weight: Tensor, bias: Tensor | None, *, row_parallel: bool, fused_wgrad: bool
    ) -> Tensor:
        """[..., in] → [..., out], this rank's shard, nothing reduced.

        `fused_wgrad`: whether apex's kernel accumulates the weight gradient (--gradient-accumulation-fusion).
        """
        assert self.active
        if row_parallel and self._decompose is not None:
            assert bias is None, "a row-parallel linear leaves its bias to bias-dropout-add"
            self._decompose(input_, weight)
        if not torch.is_grad_enabled():
            if row_parallel and self._leave_out_row_parallel:
                return _stand_in(input_, weight)
            return torch.nn.functional.linear(input_, weight, bias)
        parameters = _Parameters(
            weight,
            bias,
            self._deferred,
            row_parallel=row_parallel,
            leave_out_output=row_parallel and self._leave_out_row_parallel,
            leave_out_gradient=not row_parallel and self._decompose is not None,
            fused_wgrad=fused_wgrad,
        )
        return _Linear.apply(input_, parameters)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Hides the parameters from autograd: with an edge to them, their hooks would fire before the gradient is there."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    deferred: DeferredGradients
    row_parallel: bool
    leave_out_output: bool
    leave_out_gradient: bool
    fused_wgrad: bool


def _stand_in(input_: Tensor, weight: Tensor) -> Tensor:
    """In the shape of the linear's output, and without a meaning."""
    return input_.new_zeros(()).expand(*input_.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_: Tensor, parameters: _Parameters) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.parameters = parameters
        weight = parameters.weight
        if parameters.leave_out_output:
            return _stand_in(input_, weight)
        return torch.nn.functional.linear(input_, weight, parameters.bias)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, None]:
        (input_,) = ctx.saved_tensors
        parameters = ctx.parameters
        # Detached: through its graph the input would keep this list alive, and with it itself.
        gradient = LinearGradient(
            parameters.weight,
            parameters.bias,
            input_.detach(),
            grad_output,
            row_parallel=parameters.row_parallel,
            fused=parameters.fused_wgrad,
        )
        parameters.deferred.append(gradient)
        return None if parameters.leave_out_gradient else grad_output.matmul(parameters.weight), None


def accumulate(gradients: DeferredGradients, *, is_last: bool) -> None:
    """Adds to the parameters' gradients, and empties the list.

    Args:
        gradients: of parameters that may occur more than once.
        is_last: whether nothing more of this micro-batch will be added to them. Only then do Megatron's hooks on the
            parameters fire: once a micro-batch, as in vanilla, whatever the number of sub-batches.
    """
    adding = _Adding(is_last)
    while gradients:
        gradient = gradients.pop(0)
        grad_output = gradient.grad_output.flatten(0, -2)
        if isinstance(gradient, LinearGradient) and gradient.weight.requires_grad:
            adding.matmul(gradient.weight, grad_output, gradient.input.flatten(0, -2), fused=gradient.fused)
        if gradient.bias is not None and gradient.bias.requires_grad:
            adding.tensor(gradient.bias, grad_output.sum(0))
    adding.fire_hooks()


class _Adding:
    """Adds gradients in the place where Megatron keeps them, if it does; else leaves them to autograd."""

    def __init__(self, is_last: bool):
        self._is_last = is_last
        self._in_place: list[torch.nn.Parameter] = []
        self._for_autograd: list[tuple[torch.nn.Parameter, Tensor]] = []

    def tensor(self, parameter: torch.nn.Parameter, gradient: Tensor) -> None:
        main_grad = getattr(parameter, "main_grad", None)
        if self._is_last or main_grad is None:
            self._for_autograd.append((parameter, gradient))
        else:
            main_grad.add_(gradient)

    def matmul(self, weight: torch.nn.Parameter, grad_output: Tensor, input_: Tensor, *, fused: bool) -> None:
        """Adds grad_output.T @ input to the weight's gradient."""
        main_grad = getattr(weight, "main_grad", None)
        in_place = main_grad is not None and hasattr(weight, "grad_added_to_main_grad")
        if in_place and fused:
            import fused_weight_gradient_mlp_cuda

            # apex's kernel reads memory as it lies.
            grad_output, input_ = grad_output.contiguous(), input_.contiguous()
            if main_grad.dtype == torch.float32:
                fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(input_, grad_output, main_grad)
            else:
                fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16(input_, grad_output, main_grad)
            self._in_place.append(weight)
        elif in_place and main_grad.dtype == grad_output.dtype:
            main_grad.addmm_(grad_output.t(), input_)
            self._in_place.append(weight)
        else:
            self.tensor(weight, grad_output.t().matmul(input_))

    def fire_hooks(self) -> None:
        """Hands the rest to autograd, and tells the hooks what is in its place already."""
        roots = [parameter for parameter, _ in self._for_autograd]
        gradients: list[Tensor | None] = [gradient for _, gradient in self._for_autograd]
        announced = self._in_place if self._is_last else []
        for weight in announced:
            weight.grad_added_to_main_grad = True
        if announced:
            with torch.enable_grad():
                roots.append(_GradientsAreInPlace.apply(*announced))
            gradients.append(None)
        if roots:
            torch.autograd.backward(roots, gradients)
        for weight in announced:
            # Another gradient of the same weight, as of tied embeddings, is one that the hook has to add.
            weight.grad_added_to_main_grad = False


class _GradientsAreInPlace(torch.autograd.Function):
    """Fires the parameters' hooks with stand-in gradients, as Megatron's fused weight gradient does."""

    @staticmethod
    def forward(ctx, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor, ...]:
        # Megatron adds the stand-in where the weight says so; else nobody reads it.
        return tuple(
            torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
            for weight in ctx.saved_tensors
        )
