"""Reads GPT-2's vocabulary from local files (megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer).

What: `MegatronHFTokenizer.__init__` makes a GPT2BPETokenizer of --vocab-file and --merge-file alone.
Why: Megatron looks up the model "gpt2" in the Hugging Face hub even when both files are given, so that it fails on a
    machine without a network. All it needs from there is what kind of tokenizer it is.
Versions: megatron-core 0.19.
Can go: when GPT2BPETokenizer with both files works offline in plain Megatron.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer import MegatronHFTokenizer

from oases_patches.patching import Replacement


def _from_local_files(init: Callable) -> Callable:
    @functools.wraps(init)
    def run(
        self: MegatronHFTokenizer,
        tokenizer_path: str,
        vocab_file: str | None = None,
        merges_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        if tokenizer_path != "GPT2BPETokenizer" or vocab_file is None or merges_file is None:
            init(self, tokenizer_path, vocab_file, merges_file, **kwargs)
            return
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
            HuggingFaceTokenizer.__init__(self, folder, vocab_file, merges_file, **kwargs)

    return run


_replacement = Replacement(MegatronHFTokenizer, "__init__", _from_local_files)
apply, revert = _replacement.apply, _replacement.revert
