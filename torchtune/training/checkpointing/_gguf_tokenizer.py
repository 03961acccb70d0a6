"""The tokenizer in a GGUF file's metadata, as the files that other tools load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._gguf import GGUFFile
from torchtune.utils import atomic_write, write_json

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

# The published regular expressions of the two families; they differ in how many digits go together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _SPLIT.replace("DIGITS", "{1,3}")
_QWEN2_SPLIT = _SPLIT.replace("DIGITS", "")


def _pre_tokenizers() -> dict[str, Callable[[], Any]]:
    """tokenizer.ggml.pre -> how text is cut before merging."""
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


def _build(file: GGUFFile) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    if file.need("tokenizer.ggml.model") != "gpt2":
        raise CheckpointError(
            f"{file.path}: its tokenizer is '{file.need('tokenizer.ggml.model')}', only byte-level BPE ('gpt2') can be "
            "read from GGUF: use the tokenizer files of the Hugging Face checkpoint."
        )
    pre, known = file.get("tokenizer.ggml.pre", "default"), _pre_tokenizers()
    if pre not in known:
        raise CheckpointError(
            f"{file.path}: the pre-tokenizer '{pre}' is not known, only {', '.join(known)}: use the tokenizer files of "
            "the Hugging Face checkpoint."
        )
    tokens, types = file.need("tokenizer.ggml.tokens"), file.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = known[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL
    ]
    tokenizer.add_special_tokens(special)
    own = [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    tokenizer.add_tokens(own)
    byte_level = processors.ByteLevel(trim_offsets=False)
    if file.get("tokenizer.ggml.add_bos_token", False):
        bos = file.need("tokenizer.ggml.bos_token_id")
        template = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
        tokenizer.post_processor = processors.Sequence([byte_level, template])
    else:
        tokenizer.post_processor = byte_level
    return tokenizer


def write_tokenizer(file: GGUFFile, output_dir: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json`` into ``output_dir``.

    The class is PreTrainedTokenizerFast: ``transformers`` rebuilds the pre-tokenizer of other classes from its own
    idea of the family, and loses what the file says.

    Raises:
        CheckpointError: a kind of tokenizer that cannot be expressed.
    """
    tokens = file.need("tokenizer.ggml.tokens")
    ids = {
        name: file.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    with atomic_write(output_dir / "tokenizer.json", "w") as out:
        out.write(_build(file).to_str(pretty=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
        "add_bos_token": bool(file.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.need("{arch}.context_length"),
        "chat_template": file.get("tokenizer.chat_template"),
    }
    write_json(
        output_dir / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None}
    )
    stops = [ids["eos"], *(file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    stops = sorted({stop for stop in stops if stop is not None})
    generation = {
        "bos_token_id": ids["bos"],
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "pad_token_id": ids["pad"],
    }
    write_json(
        output_dir / "generation_config.json", {key: value for key, value in generation.items() if value is not None}
    )


def special_ids(file: GGUFFile) -> dict[str, int]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` for a ``config.json``."""
    pairs = (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    found = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in pairs}
    return json.loads(json.dumps({name: value for name, value in found.items() if value is not None}))
