"""Missing and broken tokenizer and data files: one line that names flag and file."""

import json
import struct
from argparse import Namespace

import pytest

from megatron.oases import inputs
from megatron.oases.errors import UsageError

LENGTHS = (5, 7, 4)


@pytest.fixture
def prefix(tmp_path):
    """A data set of three documents of 16-bit tokens, as Megatron writes it."""
    pointers, tokens = [], 0
    for length in LENGTHS:
        pointers.append(2 * tokens)
        tokens += length
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i3q4q", *LENGTHS, *pointers, 0, 1, 2, 3)
    (tmp_path / "corpus.idx").write_bytes(index)
    (tmp_path / "corpus.bin").write_bytes(bytes(2 * tokens))
    return str(tmp_path / "corpus")


def _args(**given) -> Namespace:
    paths = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    unset = (*paths, "data_args_path", "per_split_data_args_path", "tokenizer_model", "vocab_file", "merge_file")
    unset += ("load", "save")
    settings = {"tokenizer_type": "NullTokenizer", "vocab_size": 100, "mock_data": True, "skip_train": False, "split": "100"}
    return Namespace(**{**dict.fromkeys(unset), **settings, "exit_on_missing_checkpoint": False, **given})


def _refused(message: str, **given) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        inputs.check_inputs(_args(**given))
    assert "\n" not in str(refusal.value)
    assert refusal.value.every_rank


def _cut(path: str, size: int) -> None:
    with open(path, "r+b") as stream:
        stream.truncate(size)


def test_a_sound_data_set_passes(prefix):
    inputs.check_inputs(_args(data_path=[prefix]))
    inputs.check_inputs(_args(data_path=["0.3", prefix, "0.7", prefix]))
    inputs.check_inputs(_args(data_path=[prefix, prefix]))
    inputs.check_inputs(_args(train_data_path=[prefix], valid_data_path=[prefix]))


def test_megatron_s_own_writer_agrees(tmp_path):
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for dtype in (numpy.uint16, numpy.int32):
        name = str(tmp_path / dtype.__name__)
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=dtype)
        for length in LENGTHS:
            builder.add_document(list(range(length)), [length])
        builder.finalize(f"{name}.idx")
        inputs.check_indexed_dataset("--data-path", name)
        _cut(f"{name}.bin", sum(LENGTHS) * dtype().itemsize - 1)
        with pytest.raises(UsageError):
            inputs.check_indexed_dataset("--data-path", name)


@pytest.mark.parametrize("flag", ["data_path", "train_data_path", "valid_data_path", "test_data_path"])
def test_missing_file(flag):
    name = "--" + flag.replace("_", "-")
    _refused(rf"^{name} /nowhere/corpus: there is no file /nowhere/corpus.idx$", **{flag: ["/nowhere/corpus"]})


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_prefix_with_suffix(prefix, suffix):
    _refused(
        rf"^--data-path {prefix}{suffix}: give the prefix, without {suffix}: {prefix}$", data_path=[prefix + suffix]
    )


def test_index_of_something_else(prefix):
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(b"PK\x03\x04" + bytes(100))
    _refused(r"^--data-path: .*corpus.idx is not an index of Megatron's: it starts with b'PK", data_path=[prefix])


def test_index_cut_off_in_its_header(prefix):
    _cut(f"{prefix}.idx", 20)
    _refused(r"corpus.idx was cut off: it has 20 bytes, its header alone 34$", data_path=[prefix])


def test_index_cut_off_later(prefix):
    _cut(f"{prefix}.idx", 100)
    _refused(r"corpus.idx was cut off: 34 \+ 3 x 12 \+ 4 x 8 = 102 bytes are needed, it has 100$", data_path=[prefix])


def test_empty_index(prefix):
    _cut(f"{prefix}.idx", 0)
    _refused(r"corpus.idx is not an index of Megatron's: it starts with b''", data_path=[prefix])


def test_data_cut_off(prefix):
    _cut(f"{prefix}.bin", 31)
    _refused(r"corpus.bin was cut off: its index describes 32 bytes, it has 31$", data_path=["1.0", prefix])


def test_weights_without_a_pair(prefix):
    _refused(r"^--data-path: 3 words do not make pairs of a weight and a prefix$", data_path=["0.3", prefix, "0.7"])


def test_data_args_file(tmp_path, prefix):
    _refused(r"^--data-args-path /nowhere: No such file or directory$", data_args_path="/nowhere")
    listed = tmp_path / "paths.txt"
    listed.write_text(f"0.5 {prefix} 0.5 /nowhere/corpus")
    _refused(r"^--data-args-path /nowhere/corpus: there is no file", data_args_path=str(listed))


def test_per_split_file(tmp_path, prefix):
    listed = tmp_path / "splits.json"
    flag = "--per-split-data-args-path"
    listed.write_text("{\n  train: 1}")
    _refused(rf"^{flag} .*splits.json: line 2 is not JSON", per_split_data_args_path=str(listed))
    listed.write_text(json.dumps({"train": prefix, "valid": [prefix]}))
    _refused(rf'^{flag} .*splits.json: the key "test" is missing$', per_split_data_args_path=str(listed))
    listed.write_text(json.dumps({"train": prefix, "valid": [prefix], "test": f"{prefix} /nowhere/corpus"}))
    _refused(rf"^{flag} /nowhere/corpus: there is no file", per_split_data_args_path=str(listed))


def test_no_tokenizer():
    _refused(r"^--tokenizer-type is missing", tokenizer_type=None)
    _refused(r"^--tokenizer-type NullTokenizer needs --vocab-size$", vocab_size=None)


def test_sentencepiece_model(tmp_path):
    kind = "SentencePieceTokenizer"
    _refused(rf"^--tokenizer-type {kind} needs --tokenizer-model$", tokenizer_type=kind)
    _refused(r"^--tokenizer-model /nowhere: there is no such file$", tokenizer_type=kind, tokenizer_model="/nowhere")
    other = tmp_path / "tokenizer.model"
    other.write_text("no model")
    _refused(r"^--tokenizer-model .* is not a SentencePiece model", tokenizer_type=kind, tokenizer_model=str(other))


def test_missing_package(monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    kind = "HuggingFaceTokenizer"
    _refused(
        rf"^--tokenizer-type {kind} needs the Python package transformers", tokenizer_type=kind, tokenizer_model="gpt2"
    )


def test_gpt2_vocabulary(monkeypatch, tmp_path):
    monkeypatch.setattr(inputs, "find_spec", lambda name: name)
    kind, vocabulary = "GPT2BPETokenizer", tmp_path / "vocab.json"
    vocabulary.write_text("{}")
    _refused(rf"^--tokenizer-type {kind} needs --vocab-file$", tokenizer_type=kind)
    _refused(rf"^--tokenizer-type {kind} needs --merge-file$", tokenizer_type=kind, vocab_file=str(vocabulary))
    _refused(
        r"^--merge-file /nowhere: there is no such file$",
        tokenizer_type=kind,
        vocab_file=str(vocabulary),
        merge_file="/nowhere",
    )


def test_another_server_speaks_for_itself(monkeypatch):
    """Where rank 0 may see other files, the first rank of a server prints what that server lacks."""
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError) as refusal:
        inputs.check_inputs(_args(data_path=["/nowhere/corpus"]))
    assert not refusal.value.every_rank


def test_no_data():
    _refused("^no data to train on: give --data-path PREFIX, or --mock-data", mock_data=False)


@pytest.mark.parametrize(
    "split, message",
    [
        ("98,1,1", r"of the 3 documents of .*corpus the validation part gets none \(0.98 x 3 and 0.99 x 3 both round to 3"),
        (None, "^--split 969, 30, 1: of the 3 documents of .* the validation part gets none"),
        ("1,98,1", "the training part gets none"),
        ("0,0,0", "^--split 0,0,0: give up to three weights"),
    ],
)
def test_bug_a_part_without_documents_hung(prefix, split, message):
    """Megatron counted for ever."""
    _refused(message, data_path=[prefix], split=split)


@pytest.mark.parametrize("split", ["1,1,1", "67,33,0", "100"])
def test_every_part_has_documents(prefix, split):
    inputs.check_inputs(_args(data_path=[prefix], split=split))


@pytest.mark.parametrize("weights", [("0", "0"), ("-1", "2"), ("inf", "1"), ("1", "nan")])
def test_weights_of_a_blend(prefix, weights):
    _refused("^--data-path: the weights .* must not be neg", data_path=[weights[0], prefix, weights[1], prefix])


def test_folders_of_checkpoints(tmp_path):
    _refused("^--load .*: there is no checkpoint", load=str(tmp_path), exit_on_missing_checkpoint=True)
    (tmp_path / "file").write_text("")
    _refused("^--save .*/file/inside: the folder cannot be made", save=str(tmp_path / "file" / "inside"))
