"""tools/preprocess_data.py: what is written, in which order, and what is refused."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.oases.data.encode import BadLine, Encoder, parse_record
from megatron.oases.data.lines import read_pieces
from megatron.oases.data.workers import encode_in_order
from megatron.oases.errors import UsageError
from tools import preprocess_data

ROOT = Path(__file__).parents[2]
NULL_TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


def write_lines(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents(prefix: Path) -> list[list[int]]:
    """The pair's documents, each of them one sequence."""
    pair = IndexedDataset(str(prefix))
    assert pair.document_indices.tolist() == list(range(len(pair) + 1))
    return [pair[i].tolist() for i in range(len(pair))]


def run(tmp_path: Path, inputs, *flags: str, tokenizer=NULL_TOKENIZER) -> None:
    inputs = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    preprocess_data.main(["--input", *inputs, "--output-prefix", str(tmp_path / "out"), *tokenizer, *flags])


def outputs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A path to a tokenizer model, with or without an end-of-sentence token."""
    folder = tmp_path_factory.mktemp("tokenizer")

    def train(eos_id: int) -> Path:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat", "a hidden sum"] * 20), model_writer=model, vocab_size=300,
            model_type="bpe", byte_fallback=True, hard_vocab_limit=False, eos_id=eos_id, minloglevel=2)
        path = folder / f"eos{eos_id}.model"
        path.write_bytes(model.getvalue())
        return path

    return train


@pytest.mark.parametrize("workers", [1, 3])
def test_documents_keep_the_order_of_the_input(tmp_path, workers):
    # Lengths vary a thousandfold, so that pieces finish out of order.
    expected = [[number % 1000] * (1 + number * 37 % 1000) for number in range(700)]
    halves = [write_lines(tmp_path / f"part{i}.jsonl", [{"text": " ".join(map(str, ids))} for ids in half])
              for i, half in enumerate((expected[:300], expected[300:]))]
    run(tmp_path, halves, "--workers", str(workers))
    assert documents(tmp_path / "out_text_document") == expected
    assert outputs(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


@pytest.mark.parametrize("vocab_size, dtype", [(65499, np.uint16), (65500, np.int32)])
def test_type_of_the_ids_follows_the_vocabulary_as_in_megatron(tmp_path, vocab_size, dtype):
    source = write_lines(tmp_path / "in.jsonl", [{"text": f"0 {vocab_size - 1}"}])
    run(tmp_path, source, tokenizer=["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)])
    pair = IndexedDataset(str(tmp_path / "out_text_document"))
    assert pair.index.dtype is dtype
    assert pair[0].tolist() == [0, vocab_size - 1]


def test_each_key_has_its_own_pair(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"title": "1", "text": "2 3"}, {"title": "4 5", "text": "6"}])
    run(tmp_path, source, "--json-keys", "title", "text")
    assert documents(tmp_path / "out_title_document") == [[1], [4, 5]]
    assert documents(tmp_path / "out_text_document") == [[2, 3], [6]]


def test_end_of_document_token_is_appended(tmp_path, sentencepiece_model):
    model = sentencepiece_model(eos_id=2)
    texts = ["the cat sat", "a sum"]
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
    run(tmp_path, source, "--append-eod", tokenizer=flags)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert documents(tmp_path / "out_text_document") == [[*processor.encode(text), 2] for text in texts]
    run(tmp_path, source, tokenizer=flags)
    assert documents(tmp_path / "out_text_document") == [processor.encode(text) for text in texts]


def test_gpt2_tokenizer_reads_the_files_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # "Ġ" is how GPT-2 writes a space.
    vocabulary = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ġa": 4, "<|endoftext|>": 5}
    (tmp_path / "v.json").write_text(json.dumps(vocabulary))
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\nĠ a")
    flags = ["--vocab-file", str(tmp_path / "v.json"), "--merge-file", str(tmp_path / "m.txt")]
    source = write_lines(tmp_path / "in.jsonl", [{"text": "ab a"}, {"text": "b"}])
    run(tmp_path, source, "--append-eod", "--workers", "2",
        tokenizer=["--tokenizer-type", "GPT2BPETokenizer", *flags])
    assert documents(tmp_path / "out_text_document") == [[2, 4, 5], [1, 5]]


def test_append_eod_is_refused_without_such_a_token(tmp_path, sentencepiece_model):
    model = sentencepiece_model(eos_id=-1)
    source = write_lines(tmp_path / "in.jsonl", [{"text": "the cat"}])
    with pytest.raises(UsageError, match="^--append-eod: SentencePieceTokenizer .*has no end-of-document token"):
        run(tmp_path, source, "--append-eod",
            tokenizer=["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)])
    with pytest.raises(UsageError, match="--append-eod: .* 1000 is outside the vocabulary .0 to 999"):
        run(tmp_path, source, "--append-eod", "--null-tokenizer-eod-id", "1000")
    assert outputs(tmp_path) == []


BAD_LINES = {
    "broken JSON": (b'{"text": "1 2"', "broken JSON"),
    "blank line": (b"", "blank line"),
    "missing key": (b'{"tekst": "1"}', "missing key 'text' (the line has: 'tekst')"),
    "empty document": (b'{"text": " \\n"}', "empty document"),
    "value that is not text": (b'{"text": 5}', "the value under 'text' is a int, not text"),
    "not a JSON object": (b'["1 2"]', "a JSON list, not an object with keys"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8 (invalid start byte at byte 11)"),
    "text that the tokenizer refuses": (b'{"text": "one"}', "the tokenizer refuses the text under 'text'"),
    "token outside the vocabulary": (b'{"text": "1 1000"}', "token 1000 under 'text' is outside the vocabulary"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_line_is_named_and_nothing_is_written(tmp_path, kind, workers):
    line, message = BAD_LINES[kind]
    source = tmp_path / "in.jsonl"
    # In the second piece, so that the number counts over pieces.
    source.write_bytes(b'{"text": "1 2"}\n' * 70 + line + b'\n{"text": "3"}\n')
    with pytest.raises(UsageError) as raised:
        run(tmp_path, source, "--workers", str(workers))
    assert str(raised.value).startswith(f"{source} line 71: {message}")
    assert "\n" not in str(raised.value)
    assert outputs(tmp_path) == []


def test_bad_lines_are_skipped_and_counted_only_when_asked(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    lines = [line for line, _ in BAD_LINES.values()]
    source.write_bytes(b"\n".join([b'{"text": "1"}', *lines, lines[0], b'{"text": "2 3"}']))
    run(tmp_path, source, "--skip-bad-lines")
    assert documents(tmp_path / "out_text_document") == [[1], [2, 3]]
    report = capsys.readouterr().out
    assert f"skipped {len(lines) + 1} of {len(lines) + 3} lines: 2 broken JSON, 1 blank line" in report
    assert f"the first is {source} line 2: broken JSON" in report
    for kind in BAD_LINES:
        assert f" {kind}" in report


def test_input_without_any_document_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="no document in 0 lines"):
        run(tmp_path, tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(UsageError, match="no document in 1 lines .1 broken JSON"):
        run(tmp_path, tmp_path / "bad.jsonl", "--skip-bad-lines")


def test_older_pair_is_replaced_by_success_and_survives_failure(tmp_path):
    run(tmp_path, write_lines(tmp_path / "first.jsonl", [{"text": "1"}]))
    with pytest.raises(UsageError):
        run(tmp_path, write_lines(tmp_path / "broken.jsonl", [{"text": "7"}, {}]))
    assert documents(tmp_path / "out_text_document") == [[1]]
    run(tmp_path, write_lines(tmp_path / "second.jsonl", [{"text": "2"}, {"text": "3"}]))
    assert documents(tmp_path / "out_text_document") == [[2], [3]]


def test_patterns_gzip_and_byte_order_marks_are_read(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "2"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "1"}')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "3"}\n'))
    run(tmp_path, [tmp_path / "?.jsonl", tmp_path / "c.jsonl.gz"])
    assert documents(tmp_path / "out_text_document") == [[1], [2], [3]]


def test_output_folder_is_made(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    preprocess_data.main(["--input", str(source), "--output-prefix", str(tmp_path / "new/folder/x"), *NULL_TOKENIZER])
    assert documents(tmp_path / "new/folder/x_text_document") == [[1]]


@pytest.mark.parametrize("flags, message", [
    (["--input", "absent.jsonl", *NULL_TOKENIZER], "--input absent.jsonl: no such file"),
    (["--input", "absent/*.jsonl", *NULL_TOKENIZER], "--input absent/*.jsonl: no such file"),
    (["--input", ".", *NULL_TOKENIZER], "--input .: a folder, not a file"),
    (["--input", "cut.jsonl.gz", *NULL_TOKENIZER], "--input cut.jsonl.gz: Compressed file ended"),
    (["--input", "in.jsonl"], "--tokenizer-type is missing"),
    (["--input", "in.jsonl", "--tokenizer-type", "Wrong"], "argument --tokenizer-type: invalid choice: 'Wrong'"),
    (["--input", "in.jsonl", "--tokenizer-type", "SFTTokenizer"], "--tokenizer-type SFTTokenizer is not a tokenizer"),
    (["--input", "in.jsonl", "--tokenizer-type", "NullTokenizer"], "--tokenizer-type NullTokenizer needs --vocab-size"),
    (["--input", "in.jsonl", "--tokenizer-type", "SentencePieceTokenizer"],
     "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model"),
    (["--input", "in.jsonl", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "absent.model"],
     "--tokenizer-model absent.model: there is no such file"),
    (["--input", "in.jsonl", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "in.jsonl"],
     "--tokenizer-model in.jsonl is not a SentencePiece model"),
    (["--input", "in.jsonl", "--tokenizer-type", "TikTokenizer", "--tokenizer-model", "in.jsonl"],
     "--tokenizer-type TikTokenizer: cannot load in.jsonl"),
    (["--input", "in.jsonl", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "./absent"],
     "--tokenizer-model ./absent: no such folder"),
    (["--input", "in.jsonl", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "in.jsonl"],
     "--tokenizer-type GPT2BPETokenizer needs --merge-file"),
    (["--input", "in.jsonl", *NULL_TOKENIZER, "--workers", "0"], "--workers 0: at least 1"),
    (["--input", "in.jsonl", *NULL_TOKENIZER, "--log-interval", "0"], "--log-interval 0: at least 1"),
    (["--input", "in.jsonl", *NULL_TOKENIZER, "--json-keys", "a", "a"], "--json-keys a a: given twice"),
    (["--input", "in.jsonl", *NULL_TOKENIZER, "--output-prefix", "in.jsonl/x"],
     "--output-prefix: cannot write in.jsonl/x"),
    (NULL_TOKENIZER, "the following arguments are required: --input"),
])
def test_mistakes_are_told_in_one_line(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [{"text": "1 2"}])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "3"}\n' * 100)[:-12])
    with pytest.raises(UsageError) as raised:
        preprocess_data.main(["--output-prefix", "out", *flags])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert outputs(tmp_path) == []


def test_command_ends_with_code_2_and_one_line(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "1"}, {"text": ""}])
    result = subprocess.run(
        [sys.executable, ROOT / "tools/preprocess_data.py", "--input", source, "--output-prefix", tmp_path / "out",
         "--workers", "2", *NULL_TOKENIZER],
        capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (f"error: {source} line 2: empty document (no text under 'text'); mend it, or leave such "
                             "lines out with --skip-bad-lines\n")
    assert outputs(tmp_path) == []


class DeadlyTokenizer:
    """Ends the process that meets the word "die", as the kernel does when memory runs out."""

    vocab_size = 10

    def tokenize(self, text):
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return [1]


def test_killed_worker_ends_the_run(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "live"}] * 200 + [{"text": "die"}])
    encoder = Encoder(DeadlyTokenizer(), ["text"], np.uint16, None)
    with pytest.raises(UsageError, match="--workers 2: a worker was killed"):
        list(encode_in_order(encoder, read_pieces([str(source)]), workers=2))


def test_lone_surrogates_are_a_bad_line(tmp_path, sentencepiece_model):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "the \\ud800 cat"}\n')
    with pytest.raises(UsageError, match="line 1: the tokenizer refuses the text"):
        run(tmp_path, source, tokenizer=["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model",
                                         str(sentencepiece_model(eos_id=2))])


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("line, column", [(b'{"text": "1"', 13), (b'{"text":', 9), (b'{"text": "1 2', 10)])
def test_bug_column_of_a_line_that_is_cut_off(line, column, ending):
    # The line break was part of what was parsed, and so the end of the input was column 1 of the next line.
    with pytest.raises(BadLine, match=f"at column {column}\\)"):
        parse_record(line + ending)
