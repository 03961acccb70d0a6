"""GGUF, llama.cpp's single-file format, as a source of weights (read by the optional package ``gguf``).

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensors are dequantized one at a time.
"""

import json
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from torchtune.checkpoints._weight_files import CheckpointError, Source
from torchtune.models import Description, Llama3RopeScaling, ModelError, ModelSpec, Slices, spec_for_architecture
from torchtune.utils import get_logger, require

# general.architecture -> architecture in a Hugging Face config.json
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Maximum number of values in a header, where a string counts as two: the largest vocabularies have about a million
# tokens and merges.
_MOST_READS = 2**23


class GGUFFile(Source):
    """A GGUF file: metadata, and tensors that are dequantized on reading.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing, truncated or not GGUF.
        UserError: the ``gguf`` package is not installed.

    Example:
        >>> file = torchtune.checkpoints.GGUFFile("/tmp/SmolLM2-135M-Instruct.Q8_0.gguf")  # doctest: +SKIP
    """

    kind = "gguf"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"There is no file {self.path}: check checkpoint_dir and checkpoint_files.")
        gguf = require("gguf", extra="gguf", purpose=f"Reading {self.path.name}")
        try:
            reader = _make_reader(gguf, self.path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._metadata = {name: field.contents for name, field in reader.fields.items()}
        except (
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            OverflowError,
            MemoryError,
            RecursionError,
            OSError,
        ) as error:
            raise CheckpointError(
                f"{self.path} is not a whole GGUF file ({type(error).__name__}: {error}): download it again."
            ) from error
        self._dequantize = gguf.quants.dequantize

    def names(self) -> list[str]:
        """Return the names of the tensors, in file order."""
        return list(self._tensors)

    def where(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self.path

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, outermost dimension first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        """Read a tensor, or a slice of it, in float32.

        Raises:
            CheckpointError: its quantization type is not supported.
        """
        tensor = self._tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: the tensor '{name}' is quantized as {tensor.tensor_type.name}, which cannot be read: "
                "use a file quantized as Q8_0, Q4_0, Q4_1, a K-quant, F16, BF16 or F32."
            ) from error
        return torch.from_numpy(values.astype("float32")).reshape(self.shape(name))[slices or ...]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value; ``{arch}`` in the key stands for the architecture."""
        value = self._value(key.replace("{arch}", self.architecture))
        return default if value is None else value

    def _value(self, key: str) -> Any:
        contents = self._metadata.get(key)
        try:
            return None if contents is None else contents()
        except (ValueError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{self.path}: the metadata '{key}' is damaged ({error}): download it again."
            ) from error

    def need(self, key: str) -> Any:
        """Return a required metadata value. Raises ``CheckpointError`` if it is missing."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.path} has no metadata '{key.replace('{arch}', self.architecture)}': it is incomplete."
            )
        return value

    @cached_property
    def architecture(self) -> str:
        """``general.architecture``, for example ``"llama"``."""
        value = self._value("general.architecture")
        if not isinstance(value, str):
            raise CheckpointError(f"{self.path} does not say its architecture: it is incomplete.")
        return value

    @cached_property
    def spec(self) -> ModelSpec:
        """The model family of the file."""
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: the architecture '{self.architecture}' cannot be read from GGUF, only "
                f"{', '.join(ARCHITECTURES)}."
            )
        return spec_for_architecture(ARCHITECTURES[self.architecture])

    @cached_property
    def description(self) -> Description:
        """The model that the metadata describes.

        Raises:
            CheckpointError: the metadata is damaged or describes an unsupported model.
        """
        try:
            return self._describe()
        except CheckpointError:
            raise
        except (ModelError, TypeError, ValueError, ArithmeticError, KeyError, IndexError) as error:
            raise CheckpointError(
                f"{self.path}: its metadata describe no model ({str(error).rstrip('.')}): download it again."
            ) from error

    def _describe(self) -> Description:
        heads, embed_dim = self.need("{arch}.attention.head_count"), self.need("{arch}.embedding_length")
        head_dim = self.get("{arch}.attention.key_length", embed_dim // heads)
        for key in ("{arch}.rope.dimension_count", "{arch}.attention.value_length"):
            if self.get(key, head_dim) != head_dim:
                raise CheckpointError(
                    f"{self.path}: {key.replace('{arch}', self.architecture)} = {self.get(key)} differs from the size "
                    f"of a head ({head_dim}), which cannot be expressed."
                )
        names, layers = set(self._tensors), self.need("{arch}.block_count")
        if layers > len(names):
            raise CheckpointError(f"{self.path} lacks tensors: {layers} layers and {len(names)} tensors do not fit.")
        qwen = self.architecture.startswith("qwen")
        return Description(
            vocab_size=self.shape("token_embd.weight")[0],
            num_layers=layers,
            embed_dim=embed_dim,
            intermediate_dim=self.need("{arch}.feed_forward_length"),
            max_seq_len=self.need("{arch}.context_length"),
            num_heads=heads,
            num_kv_heads=self.get("{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            q_bias="blk.0.attn_q.bias" in names,
            k_bias="blk.0.attn_k.bias" in names,
            v_bias="blk.0.attn_v.bias" in names,
            attn_output_bias="blk.0.attn_output.bias" in names,
            qk_norm="before_rope" if "blk.0.attn_q_norm.weight" in names else "none",
            rope_base=float(self.get("{arch}.rope.freq_base", 10_000.0)),
            rope_layout="half" if qwen else "interleaved",
            rope_scaling=self._rope_scaling(),
            norm_eps=_short_float(self.need("{arch}.attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in names,
        )

    def _rope_scaling(self) -> Llama3RopeScaling | None:
        """Return Llama 3.1's RoPE scaling, which llama.cpp stores as one divisor per frequency."""
        kind = self.get("{arch}.rope.scaling.type")
        if kind not in (None, "none"):
            raise CheckpointError(f"{self.path}: rope scaling '{kind}' cannot be expressed.")
        if "rope_freqs.weight" not in self._tensors:
            return None
        divisors = self.read("rope_freqs.weight")
        scaling = Llama3RopeScaling(factor=round(float(divisors.max()), 4))
        base = float(self.get("{arch}.rope.freq_base", 10_000.0))
        if not torch.allclose(llama3_divisors(scaling, base, 2 * len(divisors)), divisors, rtol=1e-3):
            raise CheckpointError(
                f"{self.path}: its rotary frequency factors are not Llama 3.1's: use the Hugging Face checkpoint."
            )
        return scaling


def llama3_divisors(scaling: Llama3RopeScaling, base: float, head_dim: int) -> torch.Tensor:
    """Return Llama 3.1's divisors of RoPE's frequencies, float32 ``[head_dim / 2]``."""
    frequencies = base ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 / ((1 - blend) / scaling.factor + blend)).float()


def _short_float(value: float) -> float:
    """Return the shortest decimal for a float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _make_reader(gguf: Any, path: Path) -> Any:
    """Open a file; a header that announces more than the file holds, or than any model has, is an error.

    The ``gguf`` package would create a Python object for every announced value, even beyond the end of the file.
    """

    class Reader(gguf.GGUFReader):
        num_read = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
            self.num_read += 1
            found = super()._get(offset, dtype, count, *args, **kwargs)
            if len(found) < count or self.num_read > _MOST_READS:
                raise ValueError("its header announces more than the file holds, or than a model has")
            return found

    return Reader(path)


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
