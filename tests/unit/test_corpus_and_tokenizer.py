"""tools/build_corpus.py and tools/train_tokenizer.py: the quickstart's data."""

import json
from argparse import Namespace

import pytest
from megatron.training.config import TokenizerConfig

from megatron.oases.data.tokenizer import build_text_tokenizer, end_of_document_id
from megatron.oases.errors import UsageError
from tools import build_corpus, train_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    build_corpus.main(["--output", str(path), "--megabytes", "0.5"])
    return path


@pytest.fixture(scope="module")
def model(corpus):
    path = corpus.with_name("tokenizer.model")
    train_tokenizer.main(["--input", str(corpus), "--vocab-size", "600", "--output", str(path)])
    return path


def test_corpus_is_the_same_every_time_and_as_large_as_asked(corpus, tmp_path):
    again = tmp_path / "again.jsonl"
    build_corpus.main(["--output", str(again), "--megabytes", "0.5"])
    assert again.read_bytes() == corpus.read_bytes()
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    size_bytes = sum(len(text.encode()) for text in texts)
    assert 0.5e6 <= size_bytes <= 0.6e6
    assert len(texts) > 10 and all(text.strip() for text in texts)


def test_corpus_needs_sources(tmp_path):
    with pytest.raises(UsageError, match=f"--library {tmp_path}: no Python sources there"):
        build_corpus.main(["--output", str(tmp_path / "x.jsonl"), "--library", str(tmp_path)])
    with pytest.raises(UsageError, match="--megabytes -1.0: more than 0"):
        build_corpus.main(["--output", str(tmp_path / "x.jsonl"), "--megabytes", "-1"])


def test_tokenizer_is_the_same_every_time(corpus, model, tmp_path):
    again = tmp_path / "again.model"
    train_tokenizer.main(["--input", str(corpus), "--vocab-size", "600", "--output", str(again)])
    assert again.read_bytes() == model.read_bytes()


def test_megatron_loads_the_tokenizer_and_loses_nothing(model):
    args = Namespace(**vars(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model),
                                            pad_vocab_size=False)))
    tokenizer = build_text_tokenizer(args)
    assert tokenizer.vocab_size == 600
    assert end_of_document_id(tokenizer) == 2
    assert tokenizer.pad == 3
    for text in ("def f(x):\n    return x  # two  spaces\n", " leading and trailing \n\n", "naïve ☃ 日本\t\x00"):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("vocab_size, message", [
    ("0", "--vocab-size 0: at least 1"),
    ("200", "--vocab-size 200 on .*: too small; .* alone are [0-9]+ tokens$"),
    ("10000000", "--vocab-size 10000000 on .*: too large; this text gives at most [0-9]+ tokens$"),
])
def test_vocabulary_that_does_not_fit_the_text(corpus, tmp_path, vocab_size, message):
    with pytest.raises(UsageError, match=message):
        train_tokenizer.main(
            ["--input", str(corpus), "--vocab-size", vocab_size, "--output", str(tmp_path / "x.model")])
    assert list(tmp_path.iterdir()) == []


def test_several_files_and_patterns_are_read(corpus, model, tmp_path):
    lines = corpus.read_bytes().splitlines(keepends=True)
    for name, part in (("a.jsonl", lines[:5]), ("b.jsonl", lines[5:9]), ("rest.jsonl", lines[9:])):
        (tmp_path / name).write_bytes(b"".join(part))
    train_tokenizer.main(["--input", str(tmp_path / "[ab].jsonl"), str(tmp_path / "rest.jsonl"), "--vocab-size", "600",
                          "--output", str(tmp_path / "x.model")])
    assert (tmp_path / "x.model").read_bytes() == model.read_bytes()
    with pytest.raises(UsageError, match="absent.jsonl: no such file"):
        train_tokenizer.main(["--input", str(tmp_path / "absent.jsonl"), "--output", str(tmp_path / "y.model")])


def test_files_without_text_are_named(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="empty.jsonl: there is no text in it"):
        train_tokenizer.main(["--input", str(tmp_path / "empty.jsonl"), "--output", str(tmp_path / "x.model")])


def test_broken_line_is_named(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "fine"}\n{"tekst": "not"}\n')
    with pytest.raises(UsageError, match=f"^{path} line 2: missing key 'text'"):
        train_tokenizer.main(["--input", str(path), "--output", str(tmp_path / "x.model")])
