"""JSON lines in, .bin/.idx out: several processes tokenize, one writes, and documents keep the input's order."""

import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from megatron.core.datasets.indexed_dataset import DType

from megatron.oases.data.encode import Encoder, Skipped
from megatron.oases.data.lines import find_inputs, read_pieces
from megatron.oases.data.output import PairWriter
from megatron.oases.data.tokenizer import build_text_tokenizer, end_of_document_id
from megatron.oases.data.workers import encode_in_order
from megatron.oases.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """What is read, how lines become documents, and where they go."""

    inputs: tuple[str, ...]
    json_keys: tuple[str, ...]
    output_prefix: str
    append_eod: bool
    skip_bad_lines: bool
    workers: int
    log_interval: int
    """Documents between two progress lines."""

    def __post_init__(self):
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers}: at least 1")
        if self.log_interval < 1:
            raise UsageError(f"--log-interval {self.log_interval}: at least 1")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise UsageError(f"--json-keys {' '.join(self.json_keys)}: given twice; each has its own file")


@dataclass
class Summary:
    """What a run did."""

    document_count: int = 0
    line_count: int = 0
    size_bytes: int = 0
    skipped: Counter = field(default_factory=Counter)
    first_skipped: Skipped | None = None


def preprocess(config: PreprocessConfig, tokenizer_args: Namespace, log: Callable[[str], None]) -> Summary:
    """Writes one pair a key, `<output-prefix>_<key>_document`; nothing is written where anything fails."""
    paths = find_inputs(config.inputs)
    tokenizer = build_text_tokenizer(tokenizer_args)
    end_id = None
    if config.append_eod:
        end_id = end_of_document_id(tokenizer)
        if end_id is None:
            raise UsageError(f"--append-eod: {tokenizer_args.tokenizer_type} "
                             f"{tokenizer_args.tokenizer_model or tokenizer_args.vocab_file or ''} "
                             "has no end-of-document token; leave the flag out, or train the tokenizer with one")
        if end_id >= tokenizer.vocab_size:
            raise UsageError(f"--append-eod: the end-of-document token {end_id} is outside the vocabulary "
                             f"(0 to {tokenizer.vocab_size - 1})")
    # As Megatron chooses it: training reads the type from the index.
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    encoder = Encoder(tokenizer, config.json_keys, dtype, end_id)

    with ExitStack() as cleanup:
        writers = {key: _open_writer(f"{config.output_prefix}_{key}_document", dtype, cleanup)
                   for key in config.json_keys}
        try:
            summary = _encode_all(config, paths, encoder, writers, log)
            if summary.document_count == 0:
                raise UsageError(f"--input {' '.join(config.inputs)}: no document in {summary.line_count} lines"
                                 + (f" ({_reasons(summary)})" if summary.skipped else ""))
            for writer in writers.values():
                writer.finish()
            for writer in writers.values():
                writer.publish()
        except OSError as error:
            raise UsageError(f"--output-prefix {config.output_prefix}: {error.strerror or error}") from error
    for writer in writers.values():
        log(f"wrote {writer.prefix}.bin and .idx: {writer.document_count} documents, {writer.token_count} tokens "
            f"({dtype.__name__})")
    if summary.skipped:
        first = summary.first_skipped
        log(f"skipped {summary.skipped.total()} of {summary.line_count} lines: {_reasons(summary)}; "
            f"the first is {first.path} line {first.number}: {first.detail}")
    return summary


def _open_writer(prefix: str, dtype, cleanup: ExitStack) -> PairWriter:
    try:
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        writer = PairWriter(prefix, dtype)
    except OSError as error:
        raise UsageError(f"--output-prefix: cannot write {prefix}.bin: {error.strerror}") from error
    cleanup.callback(writer.discard)
    return writer


def _encode_all(config: PreprocessConfig, paths: Sequence[str], encoder: Encoder, writers: dict[str, PairWriter],
                log: Callable[[str], None]) -> Summary:
    summary = Summary()
    start_s = time.monotonic()
    next_log = config.log_interval
    # closing(): a bad line must end the workers before the error is told.
    with closing(encode_in_order(encoder, read_pieces(paths), config.workers)) as pieces:
        for encoded in pieces:
            for skipped in encoded.skipped:
                if not config.skip_bad_lines:
                    raise UsageError(f"{skipped.path} line {skipped.number}: {skipped.detail}; mend it, or leave such "
                                     "lines out with --skip-bad-lines")
                summary.skipped[skipped.kind] += 1
                summary.first_skipped = summary.first_skipped or skipped
            for key, writer in writers.items():
                writer.add(encoded.ids[key], encoded.lengths[key])
            summary.line_count += encoded.line_count
            summary.document_count += encoded.line_count - len(encoded.skipped)
            summary.size_bytes += encoded.size_bytes
            if summary.document_count >= next_log:
                elapsed_s = time.monotonic() - start_s
                log(f"processed {summary.document_count} documents ({summary.document_count / elapsed_s:.0f} a second, "
                    f"{summary.size_bytes / elapsed_s / 1e6:.2f} MB/s)")
                next_log += config.log_interval * ((summary.document_count - next_log) // config.log_interval + 1)
    return summary


def _reasons(summary: Summary) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in summary.skipped.most_common())
