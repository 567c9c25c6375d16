"""Megatron's defaults, changed where they need what the machine that trains does not have.

Megatron's defaults assume a GPU, Transformer Engine and apex. A default that cannot work here is replaced by the best
that can; a flag that the user wrote himself is never replaced, but refused when it cannot work.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from megatron.oases.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Available:
    """What this run can use."""

    cuda: bool
    transformer_engine: bool
    apex: bool
    fused_wgrad: bool
    fused_softmax: bool

    @classmethod
    def detect(cls, device: str) -> "Available":
        cuda = device == "cuda"
        return cls(
            cuda=cuda,
            transformer_engine=cuda and _installed("transformer_engine"),
            # Named by their compiled parts: the package called apex may also be another one, or one built without them.
            apex=cuda and _installed("amp_C"),
            fused_wgrad=cuda and _installed("fused_weight_gradient_mlp_cuda"),
            fused_softmax=cuda and _installed("scaled_upper_triang_masked_softmax_cuda"),
        )


    @classmethod
    def torch_alone(cls, device: str) -> "Available":
        """With neither Transformer Engine nor apex."""
        cuda = device == "cuda"
        return cls(cuda=cuda, transformer_engine=False, apex=False, fused_wgrad=False, fused_softmax=False)

    @property
    def possible(self) -> "Available":
        """What may be there beside what is known: on another machine with a GPU, anything."""
        if not self.cuda:
            return self
        return Available(cuda=True, transformer_engine=True, apex=True, fused_wgrad=True, fused_softmax=True)


def _installed(module: str) -> bool:
    return find_spec(module) is not None


def choose_defaults(
    parser: ArgumentParser, given: Namespace, available: Available, *, schedule: str, split: str, core_attention: str
) -> list[str]:
    """Sets the parser's defaults to what works where training runs.

    Args:
        parser: Megatron's parser.
        given: the flags on the command line, without defaults.
        available: what that machine has.
        schedule: the schedule that will run the decoder.
        split: along what it cuts sub-batches.
        core_attention: who computes core attention.

    Returns:
        The changes, written as flags.
    """
    # The schedule owns the collectives of Megatron's own layers; Transformer Engine's communicate by themselves.
    use_te = available.transformer_engine and schedule == "vanilla" and core_attention == "local"
    te = getattr(given, "transformer_impl", "transformer_engine" if use_te else "local") == "transformer_engine"
    choices: list[tuple[str, Any, str]] = []
    if not te:
        choices.append(("transformer_impl", "local", "--transformer-impl local"))
        if not available.apex:
            choices.append(("no_persist_layer_norm", True, "--no-persist-layer-norm"))
    # Transformer Engine's core attention knows no chunks of a sequence.
    if available.transformer_engine and schedule != "vanilla" and split == "batch":
        choices.append(("oases_core_attention", "te", "--oases-core-attention te"))
        core_attention = core_attention if "oases_core_attention" in given else "te"
    if not available.transformer_engine:
        choices.append(("apply_rope_fusion", False, "--no-rope-fusion"))
    if not available.fused_wgrad:
        choices.append(("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion"))
    if not available.fused_softmax:
        choices.append(("masked_softmax_fusion", False, "--no-masked-softmax-fusion"))
    if not available.cuda:
        choices.append(("distributed_backend", "gloo", "--distributed-backend gloo"))
        # These work on the CPU, but cost more than they save.
        choices.append(("bias_gelu_fusion", False, "--no-bias-gelu-fusion"))
        choices.append(("bias_swiglu_fusion", False, "--no-bias-swiglu-fusion"))
        choices.append(("bias_dropout_fusion", False, "--no-bias-dropout-fusion"))
    # Without a mask in memory, these know that attention is causal, and take faster kernels.
    knows_causal = not available.cuda or core_attention in ("sdpa", "te")
    if knows_causal and not getattr(given, "reset_attention_mask", False):
        choices.append(("create_attention_mask_in_dataloader", False, "--no-create-attention-mask-in-dataloader"))
    if not _installed("one_logger"):
        # Megatron would advise to install a package that NVIDIA keeps to itself. Not worth a line.
        parser.set_defaults(enable_one_logger=False)
    choices = [choice for choice in choices if choice[0] not in given]
    parser.set_defaults(**{name: value for name, value, _ in choices})
    return [flag for _, _, flag in choices]


def refuse_impossible(given: Namespace, available: Available) -> None:
    """Raises `UsageError` for a flag that needs what is not there.

    Args:
        given: the flags on the command line, without defaults.
        available: what there is.
    """
    values = vars(given)
    if values.get("transformer_impl") in ("transformer_engine", "inference_optimized"):
        _require(
            available.transformer_engine,
            f"--transformer-impl {given.transformer_impl}",
            "Transformer Engine and a GPU",
        )
    if values.get("oases_core_attention") == "te":
        _require(available.transformer_engine, "--oases-core-attention te", "Transformer Engine and a GPU")
    if values.get("distributed_backend") == "nccl":
        _require(available.cuda, "--distributed-backend nccl", "a GPU")
    for name, flag in _NEED_TRANSFORMER_ENGINE.items():
        _require(available.transformer_engine or not values.get(name), flag, "Transformer Engine and a GPU")
    if str(getattr(values.get("attention_backend"), "name", "auto")) in ("flash", "fused"):
        _require(
            available.transformer_engine,
            f"--attention-backend {given.attention_backend.name}",
            "Transformer Engine and a GPU",
        )
    either = available.transformer_engine or available.apex
    _require(
        either or not values.get("layernorm_zero_centered_gamma"),
        "--apply-layernorm-1p",
        "apex, or Transformer Engine, and a GPU",
    )
    for name, flag in _NEED_GPU.items():
        _require(available.cuda or values.get(name) in (None, False, "none"), flag, "a GPU")


_NEED_TRANSFORMER_ENGINE = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "tp_comm_overlap": "--tp-comm-overlap",
    "delay_wgrad_compute": "--delay-wgrad-compute",
    "use_flash_attn": "--use-flash-attn",
}
_NEED_GPU = {
    "cuda_graph_impl": "--cuda-graph-impl",
    "enable_cuda_graph": "--enable-cuda-graph",
    "external_cuda_graph": "--external-cuda-graph",
    "nccl_ub": "--use-nccl-ub",
    "use_sharp": "--use-sharp",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading",
}


def _require(satisfied: bool, flag: str, need: str) -> None:
    if not satisfied:
        raise UsageError(f"{flag} needs {need}, which this run does not have")
