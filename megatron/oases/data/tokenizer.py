"""Building Megatron's tokenizers for preprocessing, with users' mistakes told in one line."""

import os
from argparse import Namespace

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron.oases.errors import UsageError
from megatron.oases.inputs import check_tokenizer
from oases_patches import tokenizers_megatron_hf_tokenizer

# They turn conversations or pictures into tokens, not plain text.
_NOT_FOR_TEXT = ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")


def build_text_tokenizer(args: Namespace):
    """The tokenizer that Megatron's tokenizer flags ask for, the same that training builds from them."""
    if args.tokenizer_type in _NOT_FOR_TEXT:
        raise UsageError(f"--tokenizer-type {args.tokenizer_type} is not a tokenizer for plain text")
    check_tokenizer(args)
    if args.tokenizer_type == "HuggingFaceTokenizer":
        _check_folder(args.tokenizer_model)
    tokenizers_megatron_hf_tokenizer.apply()
    try:
        return build_tokenizer(args)
    except Exception as error:  # each tokenizer library has exceptions of its own
        source = args.tokenizer_model or args.vocab_file or "the tokenizer"
        reason = " ".join(str(error).split())
        raise UsageError(f"--tokenizer-type {args.tokenizer_type}: cannot load {source}: {reason}") from error


def end_of_document_id(tokenizer) -> int | None:
    """The id of the end-of-document token, or None where the tokenizer has none."""
    try:
        token_id = tokenizer.eod
    except (AttributeError, NameError, TypeError):  # what Megatron's wrappers raise for a token that was never set
        return None
    return token_id if token_id is not None and token_id >= 0 else None


def _check_folder(model: str | None) -> None:
    # Names on the hub are NAME or OWNER/NAME. Anything else is a path, and looking it up there would only take time.
    is_path = model is not None and (os.path.isabs(model) or model.startswith(".") or model.strip("/").count("/") > 1)
    if is_path and not os.path.isdir(model):
        raise UsageError(f"--tokenizer-model {model}: no such folder")
