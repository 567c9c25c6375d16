"""runtime/linear.py: weight gradients that are added later, and the hooks on the parameters."""

import pytest
import torch

from megatron.oases.runtime.linear import BiasGradient, LinearGradient, accumulate

IN, OUT, TOKENS = 3, 4, 5


class Recorder:
    """Stands where Megatron's data parallelism does: a hook that adds what is not in its place yet."""

    def __init__(self, parameter: torch.nn.Parameter, main_dtype: torch.dtype):
        parameter.main_grad = torch.zeros_like(parameter, dtype=main_dtype)
        parameter.grad_added_to_main_grad = False
        self.parameter, self.calls = parameter, 0
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(self)
        self._keeps_alive = accumulator

    def __call__(self, *_) -> None:
        self.calls += 1
        if not self.parameter.grad_added_to_main_grad:
            self.parameter.main_grad.add_(self.parameter.grad)
        self.parameter.grad = None


def _sub_batch(weight, bias, generator) -> tuple[list, torch.Tensor, torch.Tensor]:
    """What is to be added for one sub-batch, and the two gradients."""
    input_ = torch.randn(TOKENS, 2, IN, generator=generator).to(weight.dtype)
    grad_output = torch.randn(TOKENS, 2, OUT, generator=generator).to(weight.dtype)
    deferred = [
        BiasGradient(bias, grad_output),
        LinearGradient(weight, None, input_, grad_output, row_parallel=True, fused=False),
    ]
    return deferred, torch.einsum("sbo,sbi->oi", grad_output, input_), grad_output.sum((0, 1))


@pytest.mark.parametrize("dtype, main_dtype", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("sub_batches", [1, 2, 3])
def test_hooks_fire_once_for_all_sub_batches(dtype, main_dtype, sub_batches):
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(OUT, IN, dtype=dtype))
    bias = torch.nn.Parameter(torch.zeros(OUT, dtype=dtype))
    recorders = [Recorder(parameter, main_dtype) for parameter in (weight, bias)]
    weight_gradient, bias_gradient = torch.zeros(OUT, IN), torch.zeros(OUT)
    for i in range(sub_batches):
        deferred, of_weight, of_bias = _sub_batch(weight, bias, generator)
        weight_gradient += of_weight
        bias_gradient += of_bias
        assert [recorder.calls for recorder in recorders] == [0, 0]
        accumulate(deferred, is_last=i == sub_batches - 1)
        assert not deferred
    assert [recorder.calls for recorder in recorders] == [1, 1]
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(weight.main_grad, weight_gradient, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(bias.main_grad, bias_gradient, atol=tolerance, rtol=tolerance)
    assert not weight.grad_added_to_main_grad


def test_without_megatrons_buffer_autograd_accumulates():
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.nn.Parameter(torch.zeros(OUT, IN)), torch.nn.Parameter(torch.zeros(OUT))
    expected = torch.zeros(OUT, IN)
    for is_last in (False, True):
        deferred, of_weight, _ = _sub_batch(weight, bias, generator)
        expected += of_weight
        accumulate(deferred, is_last=is_last)
    torch.testing.assert_close(weight.grad, expected)


def test_frozen_parameters_are_left_alone():
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.nn.Parameter(torch.zeros(OUT, IN)), torch.nn.Parameter(torch.zeros(OUT))
    weight.requires_grad_(False)
    deferred, _, _ = _sub_batch(weight, bias, generator)
    accumulate(deferred, is_last=True)
    assert weight.grad is None and bias.grad is not None
