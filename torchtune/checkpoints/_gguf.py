"""GGUF, llama.cpp's single-file format, opened for reading: tensors, the model's sizes, and its tokenizer.

The optional package ``gguf`` reads it. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensors are
dequantized one at a time. ``_quantize`` writes such files.
"""

import json
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from torchtune.checkpoints._weight_files import CheckpointError, WeightFiles
from torchtune.models import Description, Llama3RopeScaling, ModelError, ModelSpec, Slices, spec_for_architecture
from torchtune.utils import get_logger, require

# general.architecture -> architecture in a Hugging Face config.json
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Maximum number of values in a header, where a string counts as two: the largest vocabularies have about a million
# tokens and merges.
_MAX_READS = 2**23

# tokenizer.ggml.token_type
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# Name of a special token -> key of its id in the metadata.
SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# The published regular expressions of the two families; they differ in the number of digits per token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _SPLIT.replace("DIGITS", "{1,3}")
_QWEN2_SPLIT = _SPLIT.replace("DIGITS", "")


class GGUFFile(WeightFiles):
    """A GGUF file: metadata, and tensors that are dequantized on reading.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing, truncated or not GGUF.
        UserError: the ``gguf`` package is not installed.

    Example:
        >>> file = torchtune.checkpoints.GGUFFile("/tmp/SmolLM2-135M-Instruct.Q8_0.gguf")  # doctest: +SKIP
    """

    name_format = "gguf"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"There is no file {self.path}: check checkpoint_dir and checkpoint_files.")
        gguf = require("gguf", extra="gguf", purpose=f"Reading {self.path.name}")
        try:
            reader = _make_reader(gguf, self.path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            # Methods, which _value calls on use: most values are never read.
            self._metadata = {name: field.contents for name, field in reader.fields.items()}
        except (
            # The gguf package does not check what it reads: a damaged header raises any of these.
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

    def path_of(self, name: str) -> Path:
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
        full = torch.from_numpy(values.astype("float32")).reshape(self.shape(name))
        return full[slices or ...]

    def location(self) -> Path:
        """Return the file, for error messages."""
        return self.path

    def described_model(self) -> Description:
        """Return :attr:`description`."""
        return self.description

    def tokenizer_files(self) -> dict[str, Any]:
        """Return the contents of ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

        Raises:
            CheckpointError: the kind of tokenizer is not supported.
        """
        try:
            tokenizer = json.loads(_build_tokenizer(self).to_str())
            ids = _special_ids(self)
        except CheckpointError:
            raise
        except Exception as error:  # errors of the package tokenizers are of the class Exception itself
            raise CheckpointError(
                f"{self.path}: the tokens, their kinds and the merges of its tokenizer do not fit each other "
                f"({error}): download it again."
            ) from error
        tokens = self.need("tokenizer.ggml.tokens")
        settings = {
            # For other classes, transformers replaces the file's pre-tokenizer by the default of the family.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": tokens[index] for name, index in ids.items()},
            "add_bos_token": _adds_bos(self),
            "clean_up_tokenization_spaces": False,  # decoding returns the text unchanged
            "model_max_length": self.need("{arch}.context_length"),
            "chat_template": self.get("tokenizer.chat_template"),
        }
        # Texts end with EOS, turns with EOT, and calls of tools with EOM.
        stops = set()
        for key in ("eos", "eot", "eom"):
            token_id = self.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None:
                stops.add(token_id)
        generation = {
            "bos_token_id": ids.get("bos"),
            # A list only if there are several, as in published files.
            "eos_token_id": sorted(stops) if len(stops) > 1 else next(iter(stops), None),
            "pad_token_id": ids.get("pad"),
        }
        return {
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": _without_none(settings),
            "generation_config.json": _without_none(generation),
        }

    def special_token_ids(self) -> dict[str, int]:
        """Return ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.

        Raises:
            CheckpointError: an id is outside of the vocabulary.
        """
        ids = _special_ids(self)
        return {f"{name}_token_id": index for name, index in ids.items() if name != "unk"}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value; ``{arch}`` in the key stands for the architecture."""
        value = self._value(key.replace("{arch}", self.architecture))
        return default if value is None else value

    def _value(self, key: str) -> Any:
        if key not in self._metadata:
            return None
        read_contents = self._metadata[key]
        try:
            return read_contents()
        except (ValueError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{self.path}: the metadata '{key}' is damaged ({error}): download it again."
            ) from error

    def need(self, key: str) -> Any:
        """Return a required metadata value. Raises ``CheckpointError`` if it is missing."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.path} has no metadata '{key.replace('{arch}', self.architecture)}': it is incomplete; "
                "convert the model anew, or name its folder in Hugging Face's format."
            )
        return value

    @cached_property
    def architecture(self) -> str:
        """``general.architecture``, for example ``"llama"``."""
        value = self._value("general.architecture")
        if not isinstance(value, str):
            raise CheckpointError(
                f"{self.path} does not say its architecture: it is incomplete; convert the model anew."
            )
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
        """Return the model, see :attr:`description`, which also converts the errors that damaged metadata cause.

        The defaults are llama.cpp's for missing metadata. Biases, norms of queries and keys, and tying have no
        metadata: the names of the tensors show them.
        """
        heads = self.need("{arch}.attention.head_count")
        embed_dim = self.need("{arch}.embedding_length")
        head_dim = self.get("{arch}.attention.key_length", embed_dim // heads)
        for key in ("{arch}.rope.dimension_count", "{arch}.attention.value_length"):
            if self.get(key, head_dim) != head_dim:
                raise CheckpointError(
                    f"{self.path}: {key.replace('{arch}', self.architecture)} = {self.get(key)} differs from the size "
                    f"of a head ({head_dim}), which cannot be expressed."
                )
        names = set(self._tensors)
        layers = self.need("{arch}.block_count")
        if layers > len(names):  # a damaged file may announce billions of layers
            raise CheckpointError(f"{self.path} lacks tensors: {layers} layers and {len(names)} tensors do not fit.")
        norm_eps = self.need("{arch}.attention.layer_norm_rms_epsilon")
        # llama.cpp permutes the rows of queries and keys to the interleaved layout for Llama, but not for Qwen.
        is_qwen = self.architecture.startswith("qwen")
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
            rope_layout="half" if is_qwen else "interleaved",
            rope_scaling=self._rope_scaling(),
            norm_eps=float(f"{norm_eps:.6g}"),  # the shortest decimal of a float32: 1e-05, not 9.999999747378752e-06
            tie_word_embeddings="output.weight" not in names,  # a tied weight is stored once
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
    # Llama 3.1 divides low frequencies by a factor and keeps high ones, with a linear transition between.
    frequencies = base ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 / ((1 - blend) / scaling.factor + blend)).float()


def _make_reader(gguf: Any, path: Path) -> Any:
    """Open a file; a header that announces more than the file holds, or than any model has, is an error.

    The ``gguf`` package would create a Python object for every announced value, even beyond the end of the file.
    """

    class Reader(gguf.GGUFReader):
        num_read = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
            self.num_read += 1
            values = super()._get(offset, dtype, count, *args, **kwargs)
            if len(values) < count or self.num_read > _MAX_READS:
                raise ValueError("its header announces more than the file holds, or than a model has")
            return values

    return Reader(path)


def pre_tokenizers() -> dict[str, Callable[[], Any]]:
    """Map ``tokenizer.ggml.pre`` to a function that builds the pre-tokenizer of the family's ``tokenizer.json``.

    The tokens are byte-level BPE: each pre-tokenizer splits the text, and maps its bytes to characters.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    def split(pattern: str) -> Any:
        return Sequence(
            [
                Split(Regex(pattern), behavior="isolated"),
                ByteLevel(add_prefix_space=False, use_regex=False),  # only maps bytes: the text is split already
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
    count = len(file.need("tokenizer.ggml.tokens"))
    ids = {}
    for name, key in SPECIAL_IDS.items():
        index = file.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < count:
            raise CheckpointError(f"{file.path}: the id of its {name} token is {index!r}, of {count} tokens.")
        ids[name] = index
    return ids


def _read_pre_tokenizer_name(file: GGUFFile) -> str:
    """Return the ``tokenizer.ggml.pre`` of a file. Raises ``CheckpointError`` if it is not known."""
    pre = file.get("tokenizer.ggml.pre")
    if pre is None:
        get_logger().warning(
            f"{file.path} does not say how text is cut before it is merged: it is cut as for GPT-2; compare some ids "
            "with the original tokenizer, or put its tokenizer.json beside the file."
        )
        return "default"
    supported = pre_tokenizers()
    if pre not in supported:
        raise CheckpointError(
            f"{file.path}: the pre-tokenizer '{pre}' is not known, only {', '.join(supported)}: use the tokenizer "
            "files of the Hugging Face checkpoint."
        )
    return pre


def _build_tokenizer(file: GGUFFile) -> Any:
    """Return the tokenizer in the metadata, as an object of the package ``tokenizers``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    model_type = file.need("tokenizer.ggml.model")
    if model_type != "gpt2":
        raise CheckpointError(
            f"{file.path}: its tokenizer is '{model_type}', only byte-level BPE ('gpt2') can be read from GGUF: use "
            "the tokenizer files of the Hugging Face checkpoint."
        )
    pre = _read_pre_tokenizer_name(file)
    tokens = file.need("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for merge in file.need("tokenizer.ggml.merges"):
        merges.append(tuple(merge.split(" ")))
    if len(vocab) != len(tokens):
        raise ValueError("the vocabulary has a token twice")  # tokenizer_files names the file
    # Llama 3's tokenizer takes a word of the vocabulary whole, even where its merges do not lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers()[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":  # GGUF has no field for the normalizer of the published tokenizer
        tokenizer.normalizer = normalizers.NFC()
    special = []
    user_defined = []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif token_type == USER_DEFINED:
            # Found in the text before it is split, but kept when special tokens are skipped.
            user_defined.append(AddedToken(token, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)
    byte_level = processors.ByteLevel(trim_offsets=False)
    if _adds_bos(file):
        bos_id = _special_ids(file).get("bos")
        if bos_id is None:
            raise CheckpointError(f"{file.path}: its tokenizer puts a token before every text and does not say which.")
        bos = tokens[bos_id]
        template = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
        )
        tokenizer.post_processor = processors.Sequence([byte_level, template])
    else:
        tokenizer.post_processor = byte_level
    return tokenizer


def _adds_bos(file: GGUFFile) -> bool:
    """Return whether BOS is prepended; for Llama 3 the default is True, as in llama.cpp."""
    is_llama3 = file.get("tokenizer.ggml.pre") == "llama-bpe"
    return bool(file.get("tokenizer.ggml.add_bos_token", is_llama3))


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
