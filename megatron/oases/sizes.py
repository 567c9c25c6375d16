"""Checks the sizes on the command line: what Megatron would answer with a division by zero, each rank on its own."""

from argparse import Namespace

from megatron.oases.errors import UsageError

GIB = 2**30

_AT_LEAST_ONE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
    "global_batch_size",
    "vocab_size",
    "eval_interval",
    "save_interval",
    "log_interval",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)
_AT_LEAST_ZERO = ("eval_iters", "lr", "num_workers", "lr_warmup_iters", "clip_grad")
_PROBABILITIES = ("hidden_dropout", "attention_dropout")


def check_sizes(args: Namespace) -> None:
    """Raises `UsageError` for a size that is out of range or does not divide what it must."""
    for name in _AT_LEAST_ONE:
        _require(args, name, lambda value: value >= 1, "must be at least 1")
    for name in _AT_LEAST_ZERO:
        _require(args, name, lambda value: value >= 0, "must not be negative")
    for name in _PROBABILITIES:
        _require(args, name, lambda value: 0 <= value <= 1, "is a probability, between 0 and 1")
    if not args.train_iters and not args.train_samples and not args.skip_train:
        raise UsageError("--train-iters is missing: give it, or --train-samples")
    if args.train_iters and (args.lr_warmup_iters or 0) >= (args.lr_decay_iters or args.train_iters):
        name = "lr_decay_iters" if args.lr_decay_iters else "train_iters"
        decay = f"{_flag(name)} {getattr(args, name)}"
        raise UsageError(f"--lr-warmup-iters {args.lr_warmup_iters} must be less than {decay}")
    if args.group_query_attention:
        _require_multiple(args, "num_attention_heads", "num_query_groups")
    if args.sequence_parallel and args.tensor_model_parallel_size > 1:
        _require_multiple(args, "seq_length", "tensor_model_parallel_size")


def check_shards(args: Namespace) -> None:
    """Raises `UsageError` where heads, or the columns of an MLP, cannot be spread over the tensor-parallel ranks.

    `args` are validated: Megatron has filled in what follows from other sizes.
    """
    ranks = args.tensor_model_parallel_size
    _require_multiple(args, "num_attention_heads", "tensor_model_parallel_size")
    # Fewer groups than ranks are legal: several ranks then share one.
    if args.group_query_attention and args.num_query_groups and ranks % args.num_query_groups:
        _require_multiple(args, "num_query_groups", "tensor_model_parallel_size")
    if not args.num_experts:
        _require_multiple(args, "ffn_hidden_size", "tensor_model_parallel_size")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require(args: Namespace, name: str, holds, what: str) -> None:
    value = getattr(args, name, None)
    if value is not None and not holds(value):
        raise UsageError(f"{_flag(name)} {value} {what}")


def _require_multiple(args: Namespace, name: str, of: str) -> None:
    size, parts = getattr(args, name), getattr(args, of)
    if size and parts and size % parts != 0:
        raise UsageError(indivisible(_flag(name), size, _flag(of), parts))


def indivisible(flag: str, size: int, of_flag: str, parts: int) -> str:
    """The message for a size that does not divide, with the arithmetic."""
    return f"{flag} {size} is not divisible by {of_flag} {parts}: {size} = {size // parts} x {parts} + {size % parts}"


def sub_batch_sizes(samples: int, count: int) -> tuple[int, ...]:
    """Samples of each of `count` sub-batches; the first ones are larger where it does not divide."""
    base, larger = divmod(samples, count)
    return tuple(base + (i < larger) for i in range(count))


def counted(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
