"""Patches megatron.core.tokenizers.text.libraries.huggingface_tokenizer.

What: the `AutoTokenizer` that module calls makes the GPT-2 tokenizer from the user's own vocabulary and merge files.
Why: Megatron asks the HuggingFace hub for "gpt2" and passes the files beside it. Without a network that fails, though
    --vocab-file and --merge-file hold all there is; with one, the hub's vocabulary may win over the user's.
Versions: megatron-core 0.19 with transformers 4 and 5.
Can go: when GPT2BPETokenizer with both files given reads nothing else.
"""

from megatron.core.tokenizers.text.libraries import huggingface_tokenizer

from oases_patches.patching import Replacement

_END_OF_TEXT = "<|endoftext|>"


def _with_local_gpt2(original):
    class AutoTokenizer:
        @staticmethod
        def from_pretrained(pretrained_model_name_or_path, *, vocab_file=None, merges_file=None, **kwargs):
            if pretrained_model_name_or_path == "gpt2" and vocab_file and merges_file:
                return _gpt2_from_files(vocab_file, merges_file)
            files = {"vocab_file": vocab_file, "merges_file": merges_file}
            kwargs |= {name: path for name, path in files.items() if path is not None}
            return original.from_pretrained(pretrained_model_name_or_path, **kwargs)

    return AutoTokenizer


def _gpt2_from_files(vocab_file: str, merges_file: str):
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(BPE.from_file(vocab_file, merges_file))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = {}
    if backend.token_to_id(_END_OF_TEXT) is not None:
        special_tokens = {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


_replacement = Replacement(huggingface_tokenizer, "AutoTokenizer", _with_local_gpt2)
revert = _replacement.revert


def apply() -> None:
    # Without the package transformers the module has no such name; Megatron then refuses the tokenizer itself.
    if huggingface_tokenizer.HAVE_TRANSFORMERS:
        _replacement.apply()
