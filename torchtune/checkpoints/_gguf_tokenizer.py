"""The tokenizer in a GGUF file's metadata, as Hugging Face tokenizer files."""

import json
from collections.abc import Callable
from typing import Any

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._gguf import GGUFFile
from torchtune.utils import get_logger

# tokenizer.ggml.token_type
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# Name of a special token -> key of its id in the metadata.
_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# The published regular expressions of the two families; they differ in the number of digits per token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _SPLIT.replace("DIGITS", "{1,3}")
_QWEN2_SPLIT = _SPLIT.replace("DIGITS", "")


def pre_tokenizers() -> dict[str, Callable[[], Any]]:
    """Map ``tokenizer.ggml.pre`` to the pre-tokenizer."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    def split(pattern: str) -> Any:
        return Sequence(
            [
                Split(Regex(pattern), behavior="isolated"),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def gpt2() -> Any:
        return ByteLevel(add_prefix_space=False)

    return {
        "default": gpt2,
        "gpt-2": gpt2,
        "smollm": lambda: Sequence([Digits(individual_digits=True), gpt2()]),
        "llama-bpe": lambda: split(_LLAMA3_SPLIT),
        "qwen2": lambda: split(_QWEN2_SPLIT),
    }


def _special_ids(file: GGUFFile) -> dict[str, int]:
    """Return the ids of special tokens. Raises ``CheckpointError`` for an id outside the vocabulary."""
    found = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_IDS.items()}
    count = len(file.need("tokenizer.ggml.tokens"))
    for name, index in found.items():
        if index is not None and not (isinstance(index, int) and 0 <= index < count):
            raise CheckpointError(f"{file.path}: the id of its {name} token is {index!r}, of {count} tokens.")
    return {name: index for name, index in found.items() if index is not None}


def _build(file: GGUFFile) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    if file.need("tokenizer.ggml.model") != "gpt2":
        raise CheckpointError(
            f"{file.path}: its tokenizer is '{file.need('tokenizer.ggml.model')}', only byte-level BPE ('gpt2') can be "
            "read from GGUF: use the tokenizer files of the Hugging Face checkpoint."
        )
    pre, known = file.get("tokenizer.ggml.pre"), pre_tokenizers()
    if pre is None:
        pre = "default"
        get_logger().warning(
            f"{file.path} does not say how text is cut before it is merged: it is cut as for GPT-2; compare some ids "
            "with the original tokenizer, or put its tokenizer.json beside the file."
        )
    if pre not in known:
        raise CheckpointError(
            f"{file.path}: the pre-tokenizer '{pre}' is not known, only {', '.join(known)}: use the tokenizer files of "
            "the Hugging Face checkpoint."
        )
    tokens = file.need("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")]
    if len(vocab) != len(tokens):
        raise ValueError("a token is there twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = known[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == CONTROL
    ]
    tokenizer.add_special_tokens(special)
    own = [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == USER_DEFINED]
    tokenizer.add_tokens(own)
    byte_level = processors.ByteLevel(trim_offsets=False)
    if _adds_bos(file):
        bos = _special_ids(file).get("bos")
        if bos is None:
            raise CheckpointError(f"{file.path}: its tokenizer puts a token before every text and does not say which.")
        template = processors.TemplateProcessing(
            single=[tokens[bos], "$A"],
            pair=[tokens[bos], "$A", f"{tokens[bos]}:1", "$B:1"],
            special_tokens=[(tokens[bos], bos)],
        )
        tokenizer.post_processor = processors.Sequence([byte_level, template])
    else:
        tokenizer.post_processor = byte_level
    return tokenizer


def _adds_bos(file: GGUFFile) -> bool:
    """Return whether BOS is prepended; for Llama 3 the default is True, as in llama.cpp."""
    return bool(file.get("tokenizer.ggml.add_bos_token", file.get("tokenizer.ggml.pre") == "llama-bpe"))


def tokenizer_files(file: GGUFFile) -> dict[str, Any]:
    """Return the contents of ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    The class is PreTrainedTokenizerFast: for other classes, ``transformers`` replaces the file's pre-tokenizer by the
    default of the family.

    Raises:
        CheckpointError: the kind of tokenizer is not supported.
    """
    try:
        tokenizer, ids = json.loads(_build(file).to_str()), _special_ids(file)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file.path}: the tokens, their kinds and the merges of its tokenizer do not fit each other ({error}): "
            "download it again."
        ) from error
    tokens = file.need("tokenizer.ggml.tokens")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[index] for name, index in ids.items()},
        "add_bos_token": _adds_bos(file),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.need("{arch}.context_length"),
        "chat_template": file.get("tokenizer.chat_template"),
    }
    stops = [ids.get("eos"), *(file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    stops = sorted({stop for stop in stops if stop is not None})
    generation = {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": None if not stops else stops[0] if len(stops) == 1 else stops,
        "pad_token_id": ids.get("pad"),
    }
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _without_none(settings),
        "generation_config.json": _without_none(generation),
    }


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def special_ids(file: GGUFFile) -> dict[str, int]:
    """Return ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``. Raises ``CheckpointError`` for an invalid id."""
    return {f"{name}_token_id": index for name, index in _special_ids(file).items() if name != "unk"}
