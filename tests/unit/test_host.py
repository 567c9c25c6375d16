"""Megatron's stand-ins on the CPU: what they answer, and that they can be taken back."""

import os
import sys

import pytest
import torch

from megatron.oases.host import activate


@pytest.fixture
def host():
    replacements = activate()
    yield replacements
    replacements.undo()


def _state() -> dict[str, object]:
    """Everything that activate() may touch."""
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.training import training

    owners = {
        "cuda": torch.cuda,
        "cuda.random": torch.cuda.random,
        "nvtx": torch.cuda.nvtx,
        "Tensor": torch.Tensor,
        "autograd": torch.autograd,
        "random": megatron_random,
        "clip_grads": clip_grads,
        "dataset_utils": dataset_utils,
        "DistributedOptimizer": DistributedOptimizer,
        "training": training,
    }
    state = {f"{name}.{key}": value for name, owner in owners.items() for key, value in vars(owner).items()}
    state["filters"] = tuple(megatron_random.logging.getLogger(megatron_random.__name__).filters)
    state["environment"] = dict(os.environ)
    state["function modes"] = tuple(torch.overrides._get_current_function_mode_stack())
    state["hidden"] = {name for name, module in sys.modules.items() if module is None}
    return state


def test_undo_takes_everything_back():
    activate().undo()  # Megatron is imported now, whoever ran first.
    before = _state()
    replacements = activate()
    during = _state()
    replacements.undo()
    after = _state()
    assert [name for name in before if before[name] is not during[name] and before[name] != during[name]]
    assert [name for name in before if before[name] is not after[name] and before[name] != after[name]] == []
    assert before.keys() == after.keys()


def test_torch_keeps_telling_the_truth(host):
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    assert not torch.cuda.is_initialized()
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert not torch.ones(1).is_cuda


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 0)])
def test_a_cuda_device_means_the_cpu(host, device):
    assert torch.zeros(2, device=device).device.type == "cpu"
    assert torch.empty_like(torch.ones(2), device=device).device.type == "cpu"
    assert torch.ones(2).to(device).device.type == "cpu"
    assert torch.ones(2).to(device=device, dtype=torch.float64).dtype == torch.float64
    assert torch.ones(2).cuda(non_blocking=True).device.type == "cpu"


def test_the_current_device_is_one_to_make_tensors_on(host):
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert next(torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).parameters()).device.type == "cpu"


def test_other_devices_stay(host):
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"


class _MakesCudaTensorInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full((), 2.0, device="cuda")


@pytest.mark.parametrize("how", ["method", "function", "grad"])
def test_a_cuda_device_means_the_cpu_in_backward(host, how):
    x = torch.ones(3, requires_grad=True)
    total = _MakesCudaTensorInBackward.apply(x).sum()
    if how == "method":
        total.backward()
        gradient = x.grad
    elif how == "function":
        torch.autograd.backward(total)
        gradient = x.grad
    else:
        (gradient,) = torch.autograd.grad(total, x)
    assert gradient.tolist() == [2.0, 2.0, 2.0]


def test_type_names_only_where_asked(host):
    from megatron.oases.host.device_strings import cuda_type_names

    half = torch.ones(1, dtype=torch.float16)
    with cuda_type_names(), cuda_type_names():
        assert half.type() == "torch.cuda.HalfTensor"
        assert half.type(torch.float64).dtype == torch.float64
    assert half.type() == "torch.HalfTensor"


def test_streams_and_events(host):
    stream, event, later = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    with torch.cuda.stream(stream):
        event.record()
    torch.cuda.current_stream().wait_stream(stream)
    later.record(stream)
    later.synchronize()
    assert event.elapsed_time(later) >= 0
    assert stream.record_event().query()


def test_memory_is_the_process_s_own(host):
    current, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    assert 10_000_000 < current <= peak
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 10_000_000


def test_named_random_states(host):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.manual_seed(1)
    tracker = CudaRNGStatesTracker()
    tracker.add("one", 7)
    before = torch.get_rng_state()
    with tracker.fork("one"):
        first = torch.rand(3)
    with tracker.fork("one"):
        second = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(6), torch.cat([first, second]))


def test_starting_to_iterate_over_data_leaves_dropout_alone(host, monkeypatch):
    """Regression: a resumed run drew other dropout masks, since a data loader drew its seed from the same generator."""
    from megatron.oases.host.rng import _with_own_generator

    loader = _with_own_generator(torch.utils.data.DataLoader)([1, 2, 3])
    before = torch.get_rng_state()
    assert [int(item) for item in loader] == [1, 2, 3]
    assert torch.equal(torch.get_rng_state(), before)


def test_packages_for_cuda_cannot_be_imported(host):
    with pytest.raises(ModuleNotFoundError):
        import transformer_engine  # noqa: F401
