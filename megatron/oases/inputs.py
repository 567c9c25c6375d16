"""Checks the files that a command names, before anything heavy starts.

Megatron opens tokenizer and data files deep inside a run, on some ranks only, and reports what is wrong with them as
a traceback, or as a wrong result: an index that was cut off maps memory that is not there. Each check here is one
line that names the flag.
"""

import json
import math
import os
import re
import struct
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from megatron.oases.errors import UsageError
from megatron.oases.launch import is_first_rank_of_another_server

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the token type, sequences, document boundaries
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
_LENGTH_BYTES, _POINTER_BYTES, _BOUNDARY_BYTES = 4, 8, 8
_DEFAULT_SPLIT = "969, 30, 1"  # Megatron's
_DATA_PATH_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_MODEL_TOKENIZERS = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
    "HuggingFaceTokenizer": "transformers",
    "SFTTokenizer": "transformers",
}


def check_inputs(args: Namespace) -> None:
    """Raises `UsageError` for a tokenizer, data or checkpoint file that is missing or broken."""
    check_tokenizer(args)
    prefixes = list(data_prefixes(args))
    if not prefixes and not args.mock_data and not args.skip_train:
        _fail("no data to train on: give --data-path PREFIX, or --mock-data")
    for flag, prefix in prefixes:
        sequences = check_indexed_dataset(flag, prefix)
        if flag in ("--data-path", "--data-args-path") and sequences is not None:
            _check_data_split(args.split or _DEFAULT_SPLIT, prefix, sequences)
    _check_checkpoint_folders(args)


def _check_data_split(split: str, prefix: str, sequences: int) -> None:
    """Megatron counts documents until there are enough; where a part has none, for ever."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    weights = [float(word) for word in re.findall(r"[.0-9]+", split) if _is_number(word)]
    if 0 < len(weights) <= 3 and sum(weights) > 0:
        parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    else:
        _fail(f"--split {split}: give up to three weights that are not all 0, such as 98,1,1")
    for name, part in zip(("training", "validation", "test"), parts, strict=True):
        if part is not None:
            begin, end = (round(bound * sequences) for bound in part)
            if begin == end:
                _fail(
                    f"--split {split}: of the {sequences} documents of {prefix} the {name} part gets none "
                    f"({part[0]:g} x {sequences} and {part[1]:g} x {sequences} both round to {begin}); "
                    "give it more weight, or weight 0"
                )


def _check_checkpoint_folders(args: Namespace) -> None:
    if args.load is not None and args.exit_on_missing_checkpoint:
        tracker = Path(args.load) / "latest_checkpointed_iteration.txt"
        if not tracker.is_file():
            _fail(f"--load {args.load}: there is no checkpoint (no {tracker}), and --exit-on-missing-checkpoint is given")
    if args.save is not None and "://" not in args.save:
        try:
            os.makedirs(args.save, exist_ok=True)
        except OSError as error:
            _fail(f"--save {args.save}: the folder cannot be made: {error.strerror}")


def check_tokenizer(args: Namespace) -> None:
    kind = args.tokenizer_type
    if kind is None:
        _fail("--tokenizer-type is missing: name one, for example SentencePieceTokenizer or NullTokenizer")
    if kind == "NullTokenizer" and not args.vocab_size:
        _fail("--tokenizer-type NullTokenizer needs --vocab-size")
    if kind == "GPT2BPETokenizer":
        _check_package(kind, "transformers")
        for flag, path in (("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file)):
            _check_tokenizer_file(kind, flag, path)
    if kind in _MODEL_TOKENIZERS:
        _check_package(kind, _MODEL_TOKENIZERS[kind])
        if _MODEL_TOKENIZERS[kind] == "transformers" and args.tokenizer_model is not None:
            return  # May also be a name that the package looks up.
        _check_tokenizer_file(kind, "--tokenizer-model", args.tokenizer_model)
        if _MODEL_TOKENIZERS[kind] == "sentencepiece":
            _check_sentencepiece(args.tokenizer_model)


def _check_package(kind: str, package: str) -> None:
    if find_spec(package) is None:
        _fail(f"--tokenizer-type {kind} needs the Python package {package}: pip install {package}")


def _check_tokenizer_file(kind: str, flag: str, path: str | None) -> None:
    if path is None:
        _fail(f"--tokenizer-type {kind} needs {flag}")
    if not os.path.isfile(path):
        _fail(f"{flag} {path}: there is no such file")


def _check_sentencepiece(path: str) -> None:
    from sentencepiece import SentencePieceProcessor

    try:
        SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        _fail(f"--tokenizer-model {path} is not a SentencePiece model: {str(error).splitlines()[0]}")


def data_prefixes(args: Namespace) -> Iterator[tuple[str, str]]:
    """Every data prefix of the command with the flag that it comes from."""
    for flag in _DATA_PATH_FLAGS:
        words = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if words is not None:
            yield from ((flag, prefix) for prefix in _prefixes(flag, words))
    if args.data_args_path is not None:
        words = _read("--data-args-path", args.data_args_path).split()
        yield from (("--data-args-path", prefix) for prefix in _prefixes("--data-args-path", words))
    if args.per_split_data_args_path is not None:
        yield from _per_split_prefixes(args.per_split_data_args_path)


def _per_split_prefixes(path: str) -> Iterator[tuple[str, str]]:
    flag = "--per-split-data-args-path"
    try:
        splits = json.loads(_read(flag, path))
    except json.JSONDecodeError as error:
        _fail(f"{flag} {path}: line {error.lineno} is not JSON: {error.msg}")
    for name in ("train", "valid", "test"):
        if not isinstance(splits, dict) or name not in splits:
            _fail(f'{flag} {path}: the key "{name}" is missing')
        words = splits[name].split() if isinstance(splits[name], str) else splits[name]
        yield from ((flag, prefix) for prefix in _prefixes(flag, words or []))


def _prefixes(flag: str, words: list[str]) -> list[str]:
    """Leaves out the weights: Megatron takes prefixes, or pairs of a weight and a prefix."""
    if len(words) > 1 and _is_number(words[0]):
        if len(words) % 2 != 0:
            _fail(f"{flag}: {len(words)} words do not make pairs of a weight and a prefix")
        weights = words[::2]
        if not all(_is_number(word) and 0 <= float(word) < math.inf for word in weights) or not any(map(float, weights)):
            _fail(f"{flag}: the weights {', '.join(weights)} must not be negative, and not all 0")
        return words[1::2]
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        _fail(f"{flag} {path}: {error.strerror}")


def check_indexed_dataset(flag: str, prefix: str) -> int | None:
    """Checks `prefix.idx` and `prefix.bin` against each other, reading the index's header and its last entry.

    Returns:
        The number of sequences in it; None where the files are not on this machine.
    """
    if prefix.startswith(("s3://", "msc://")):
        return None
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            _fail(f"{flag} {prefix}: give the prefix, without {suffix}: {prefix.removesuffix(suffix)}")
    index, data = f"{prefix}.idx", f"{prefix}.bin"
    for path in (index, data):
        if not os.path.isfile(path):
            _fail(f"{flag} {prefix}: there is no file {path}")
    try:
        sequences, needed_bytes = _described(flag, index)
    except OSError as error:
        _fail(f"{flag} {prefix}: {index}: {error.strerror}")
    found_bytes = os.path.getsize(data)
    if found_bytes < needed_bytes:
        _fail(f"{flag} {prefix}: {data} was cut off: its index describes {needed_bytes} bytes, it has {found_bytes}")
    return sequences


def _described(flag: str, index: str) -> tuple[int, int]:
    """How many sequences, and how many bytes of data, the index describes."""
    found_bytes = os.path.getsize(index)
    with open(index, "rb") as stream:
        header = stream.read(_HEADER.size)
        if not header.startswith(_MAGIC):
            _fail(f"{flag}: {index} is not an index of Megatron's: it starts with {header[:9]!r}, not {_MAGIC!r}")
        if len(header) < _HEADER.size:
            _fail(f"{flag}: {index} was cut off: it has {found_bytes} bytes, its header alone {_HEADER.size}")
        _, version, code, sequences, boundaries = _HEADER.unpack(header)
        if version != 1 or code not in _TOKEN_BYTES:
            _fail(f"{flag}: {index} has version {version} and token type {code}; known are version 1 and types 1 to 8")
        needed_bytes = _HEADER.size + sequences * (_LENGTH_BYTES + _POINTER_BYTES) + boundaries * _BOUNDARY_BYTES
        if found_bytes < needed_bytes:
            _fail(
                f"{flag}: {index} was cut off: {_HEADER.size} + {sequences} x {_LENGTH_BYTES + _POINTER_BYTES} + "
                f"{boundaries} x {_BOUNDARY_BYTES} = {needed_bytes} bytes are needed, it has {found_bytes}"
            )
        if sequences == 0:
            _fail(f"{flag}: {index} describes no document")
        stream.seek(_HEADER.size + (sequences - 1) * _LENGTH_BYTES)
        (length,) = struct.unpack("<i", stream.read(_LENGTH_BYTES))
        stream.seek(_HEADER.size + sequences * _LENGTH_BYTES + (sequences - 1) * _POINTER_BYTES)
        (pointer,) = struct.unpack("<q", stream.read(_POINTER_BYTES))
    return sequences, pointer + length * _TOKEN_BYTES[code]


def _fail(message: str) -> NoReturn:
    raise UsageError(message, every_rank=not is_first_rank_of_another_server())
