"""GGUF, llama.cpp's single-file format: opened for reading, written by an export, and converted back.

The optional package ``gguf`` reads and writes it. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
Tensors are quantized and dequantized one at a time.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._export import MAX_SHARD_BYTES, SaveView, write_tensors
from torchtune.checkpoints._load import ModelSource, check_base
from torchtune.checkpoints._model_weights import groups_by_weight, spec_and_description
from torchtune.checkpoints._small_files import config_of
from torchtune.checkpoints._weight_files import CheckpointError, WeightFiles, read_json
from torchtune.models import (
    Description,
    Group,
    Llama3RopeScaling,
    ModelError,
    ModelSpec,
    Slices,
    build,
    spec_for_architecture,
)
from torchtune.training.parallel import LocalShard, full_slices
from torchtune.utils import atomic_directory, get_logger, require, sign_of_life, write_json

# general.architecture -> architecture in a Hugging Face config.json
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Maximum number of values in a header, where a string counts as two: the largest vocabularies have about a million
# tokens and merges.
_MAX_READS = 2**23

# tokenizer.ggml.token_type
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
# Name of a special token -> key of its id in the metadata.
_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# The published regular expressions of the two families; they differ in the number of digits per token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _SPLIT.replace("DIGITS", "{1,3}")
_QWEN2_SPLIT = _SPLIT.replace("DIGITS", "")
# Texts that GGUF's known pre-tokenizers split differently.
_PROBES = ("It's 12345 o'clock,  isn't\n\n it? ", "naïve café 3.14 x=y+z;\t{a_b}", "WE'LL don't\r\n 2024年 日本語")
_BLOCK = 32  # consecutive elements of a row per scale, in every supported type


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
        except Exception as error:
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
            "clean_up_tokenization_spaces": False,
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
        if self.architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: the architecture '{self.architecture}' cannot be read from GGUF, only "
                f"{', '.join(_ARCHITECTURES)}."
            )
        return spec_for_architecture(_ARCHITECTURES[self.architecture])

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
        if not torch.allclose(_llama3_divisors(scaling, base, 2 * len(divisors)), divisors, rtol=1e-3):
            raise CheckpointError(
                f"{self.path}: its rotary frequency factors are not Llama 3.1's: use the Hugging Face checkpoint."
            )
        return scaling


def _llama3_divisors(scaling: Llama3RopeScaling, base: float, head_dim: int) -> torch.Tensor:
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


def _pre_tokenizers() -> dict[str, Callable[[], Any]]:
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
    count = len(file.need("tokenizer.ggml.tokens"))
    ids = {}
    for name, key in _SPECIAL_IDS.items():
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
    supported = _pre_tokenizers()
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
    types = file.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for merge in file.need("tokenizer.ggml.merges"):
        merges.append(tuple(merge.split(" ")))
    if len(vocab) != len(tokens):
        raise ValueError("the vocabulary has a token twice")
    # Llama 3's tokenizer takes a word of the vocabulary whole, even where its merges do not lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizers()[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":  # GGUF has no field for the normalizer of the published tokenizer
        tokenizer.normalizer = normalizers.NFC()
    special = []
    user_defined = []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif token_type == _USER_DEFINED:
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


def export_gguf(
    source: ModelSource,
    model: nn.Module,
    groups: Sequence[Group],
    file_type: str,
    output_dir: Path,
    *,
    dtype: torch.dtype | None,
) -> None:
    """Write a checkpoint as one GGUF file, one tensor at a time.

    Matrices are stored as ``file_type``; embedding and output projection with at least 8 bits; vectors in float32.

    Args:
        source: checkpoint with Hugging Face names and a ``tokenizer.json``.
        model: model of the checkpoint; its values are not read.
        groups: groups of the checkpoint's weight map.
        file_type: see :class:`torchtune.training.quantization.GGUFQuantizer`.
        output_dir: folder for ``model-<file_type>.gguf`` and the tokenizer's files, written atomically.
        dtype: dtype to which weights are rounded before they are quantized; None keeps the checkpoint's.

    Raises:
        CheckpointError: GGUF does not support the model or its tokenizer, or the checkpoint does not fit the model.
        UserError: the ``gguf`` package is not installed, or the disk is full.
    """
    gguf = require("gguf", extra="gguf", purpose="Writing GGUF")
    spec, description = spec_and_description(model)
    arch = None
    for name, hf_architecture in _ARCHITECTURES.items():
        if hf_architecture in spec.architectures:
            arch = name
    if arch is None or "gguf" not in spec.weight_maps:
        raise CheckpointError(
            f"quantizer: the family '{spec.name}' cannot be written as GGUF, only {', '.join(_ARCHITECTURES)}: choose "
            "another quantizer."
        )
    gguf_names = {group.tune[0]: group.external[0] for group in spec.weight_map("gguf").groups(description)}
    types = {}
    for group in groups:
        for name in group.tune:
            types[name] = _quantization_type(gguf, name, model.get_parameter(name).shape, file_type)
    metadata = _sizes(description, arch)
    metadata.update(_tokenizer_metadata(source.checkpoint_dir, description.vocab_size))
    files = source.open()
    with atomic_directory(output_dir) as folder:
        source.carry_files(folder)
        writer = gguf.GGUFWriter(folder / f"model-{file_type}.gguf", arch)
        writer.add_name(source.checkpoint_dir.resolve().name)
        name_of_type = "ALL_F32" if file_type == "F32" else f"MOSTLY_{file_type}"  # vectors are float32 in every file
        writer.add_file_type(gguf.LlamaFileType[name_of_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in metadata.items():
            _add_metadata(writer, key, value)
        # The writer needs name, shape and type of every tensor before the first values.
        divisors = _divisors(description)
        if divisors is not None:
            writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.numpy().dtype, 4 * len(divisors))
        byte_dtype = torch.empty(0, dtype=torch.uint8).numpy().dtype
        for name, quantization_type in types.items():
            shape = tuple(model.get_parameter(name).shape)
            byte_shape = gguf.quants.quant_shape_to_byte_shape(shape, quantization_type)
            writer.add_tensor_info(gguf_names[name], byte_shape, byte_dtype, math.prod(byte_shape), quantization_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(divisors.numpy())
        for group in groups:
            external_tensors = [files.read(name) for name in group.external]
            if dtype is not None:
                external_tensors = [tensor.to(dtype) for tensor in external_tensors]
            # llama.cpp has the order of rows that this library has, and other names.
            for name, weight in zip(group.tune, group.to_tune(external_tensors), strict=True):
                sign_of_life()
                values = weight.float().contiguous().numpy()
                writer.write_tensor_data(gguf.quants.quantize(values, types[name]))
        writer.close()


def _quantization_type(gguf: ModuleType, name: str, shape: torch.Size, file_type: str) -> Any:
    """Return the type of one tensor in a file of ``file_type``."""
    if len(shape) == 1:  # norms and biases, which are small
        return gguf.GGMLQuantizationType.F32
    if file_type.startswith("Q"):
        if shape[-1] % _BLOCK:
            raise CheckpointError(
                f"quantizer: {file_type} stores rows in blocks of {_BLOCK}, which do not divide the {shape[-1]} inputs "
                f"of '{name}': choose F16 or BF16."
            )
        if name in ("tok_embeddings.weight", "output.weight"):
            file_type = "Q8_0"  # their rounding reaches every token
    return gguf.GGMLQuantizationType[file_type]


def _add_metadata(writer: Any, key: str, value: Any) -> None:
    """Add a value with the type that llama.cpp expects."""
    if isinstance(value, bool):  # before integers, which bools are in Python
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _sizes(description: Description, arch: str) -> dict[str, Any]:
    """Return the metadata with the sizes of a model."""
    sizes = {
        "vocab_size": description.vocab_size,
        "context_length": description.max_seq_len,
        "embedding_length": description.embed_dim,
        "block_count": description.num_layers,
        "feed_forward_length": description.intermediate_dim,
        "attention.head_count": description.num_heads,
        "attention.head_count_kv": description.num_kv_heads,
        "attention.key_length": description.head_dim,
        "attention.value_length": description.head_dim,
        "attention.layer_norm_rms_epsilon": float(description.norm_eps),
        "rope.dimension_count": description.head_dim,
        "rope.freq_base": float(description.rope_base),
    }
    return {f"{arch}.{key}": value for key, value in sizes.items()}


def _divisors(description: Description) -> torch.Tensor | None:
    """Return Llama 3.1's scaling as one divisor per frequency. Raises ``CheckpointError`` for another scaling."""
    scaling = description.rope_scaling
    if scaling is None:
        return None
    if not isinstance(scaling, Llama3RopeScaling):
        raise CheckpointError(f"quantizer: {type(scaling).__name__} cannot be written as GGUF.")
    return _llama3_divisors(scaling, description.rope_base, description.head_dim)


def _tokenizer_metadata(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of the tokenizer in ``tokenizer.json``, which must be a byte-level BPE."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"quantizer: there is no {path}, whose vocabulary a GGUF file needs: put it there.")
    contents = read_json(path)
    model = contents.get("model", {})
    pre = None
    if model.get("type") == "BPE":
        pre = _pre_tokenizer_name(Tokenizer.from_file(str(path)))
    if pre is None or model.get("byte_fallback"):
        raise CheckpointError(
            f"quantizer: {path} is not a byte-level BPE with a pre-tokenizer that GGUF has a name for: choose a "
            "quantizer that writes safetensors."
        )
    added_tokens = {token["content"]: token for token in contents.get("added_tokens", ())}
    vocab = dict(model["vocab"])
    for text, token in added_tokens.items():
        vocab[text] = token["id"]
    # The model may have more rows than the tokenizer has tokens; llama.cpp's converter gives them these names.
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for text, index in vocab.items():
        if index >= vocab_size:
            raise CheckpointError(
                f"quantizer: {path} gives '{text}' the id {index}, but the model has {vocab_size} tokens: use the "
                "tokenizer of the model."
            )
        tokens[index] = text
        if text not in added_tokens:
            types[index] = _NORMAL
        elif added_tokens[text]["special"]:
            types[index] = _CONTROL
        else:
            types[index] = _USER_DEFINED
    merges = []
    for merge in model["merges"]:
        is_pair = not isinstance(merge, str)  # in newer files; text in older ones
        merges.append(" ".join(merge) if is_pair else merge)
    # A post-processor with a template puts BOS before every text.
    adds_bos = "TemplateProcessing" in json.dumps(contents.get("post_processor"))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": adds_bos,
        **_tokenizer_settings(folder, vocab),
    }


def _tokenizer_settings(folder: Path, vocab: dict[str, int]) -> dict[str, Any]:
    """Return the metadata of special tokens and chat template in a folder."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    metadata: dict[str, Any] = {}
    for name, key in _SPECIAL_IDS.items():
        token = settings.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token in vocab:
            metadata[f"tokenizer.ggml.{key}_token_id"] = vocab[token]
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        metadata["tokenizer.chat_template"] = template_file.read_text(encoding="utf-8")
    elif isinstance(settings.get("chat_template"), str):
        metadata["tokenizer.chat_template"] = settings["chat_template"]
    return metadata


def _pre_tokenizer_name(tokenizer: Any) -> str | None:
    """Return the ``tokenizer.ggml.pre`` of a tokenizer's pre-tokenizer."""
    if tokenizer.pre_tokenizer is None:
        return None
    # Compare results: one pre-tokenizer can be written in several ways.
    cuts = [tokenizer.pre_tokenizer.pre_tokenize_str(text) for text in _PROBES]
    for name, make_pre_tokenizer in _pre_tokenizers().items():
        pre_tokenizer = make_pre_tokenizer()
        if [pre_tokenizer.pre_tokenize_str(text) for text in _PROBES] == cuts:
            return name
    return None


def gguf_to_hf(gguf_file: str | Path, output_dir: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model and tokenizer of a GGUF file as a folder that Hugging Face libraries load.

    Quantized weights are dequantized and rounded to ``dtype``, one tensor at a time.

    Args:
        gguf_file: GGUF file with the architecture llama, qwen2 or qwen3, and a byte-level BPE tokenizer.
        output_dir: output folder, written atomically; an existing one is replaced.
        dtype: dtype of the weights.

    Returns:
        ``output_dir``.

    Raises:
        CheckpointError: the file is corrupt or has unsupported contents.
        UserError: the ``gguf`` package is not installed, or the disk is full.
    """
    file = GGUFFile(gguf_file)
    spec = file.spec
    description = file.description
    with torch.device("meta"):
        model = build(description, spec).to(dtype)
    view = _GGUFView(model, file)
    check_base(view, file)
    tensors = [view.tensor_group(group, turn=0) for group in spec.weight_map("hf").groups(description)]
    with atomic_directory(output_dir) as folder:
        config = config_of(spec, description, description.vocab_size, dtype, None)
        write_json(folder / "config.json", {**config, **file.special_token_ids()})
        for name, content in file.tokenizer_files().items():
            write_json(folder / name, content)
        write_tensors(tensors, folder, MAX_SHARD_BYTES)
    return Path(output_dir)


class _GGUFView(SaveView):
    """View of a model on the meta device that reads each weight from a GGUF file when it is written."""

    def __init__(self, model: nn.Module, file: GGUFFile) -> None:
        super().__init__(model, frozenset({"model"}))
        self._file = file
        self._gguf_groups = groups_by_weight(file.spec.weight_map("gguf"), file.description)

    def shard(self, name: str, turn: int) -> LocalShard:
        """Read a full weight."""
        group = self._gguf_groups[name]
        spec = self.specs[name]
        tensors = group.to_tune([self._file.read(external) for external in group.external])
        weight = tensors[group.tune.index(name)].to(spec.dtype)
        return LocalShard(spec, full_slices(weight.shape), weight, is_writer=True)
