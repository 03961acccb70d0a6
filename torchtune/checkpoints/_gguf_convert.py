"""Convert checkpoints to GGUF files for llama.cpp (written by the optional package ``gguf``), and back.

The files have the architectures, names and layouts that :mod:`torchtune.checkpoints._gguf` reads. Tensors are quantized
one at a time.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._export import MAX_SHARD_BYTES, SaveView, write_tensors
from torchtune.checkpoints._gguf import (
    ARCHITECTURES,
    CONTROL,
    NORMAL,
    SPECIAL_IDS,
    UNUSED,
    USER_DEFINED,
    GGUFFile,
    llama3_divisors,
    pre_tokenizers,
)
from torchtune.checkpoints._load import ModelSource, check_base
from torchtune.checkpoints._model_weights import groups_by_weight, spec_and_description
from torchtune.checkpoints._small_files import config_of
from torchtune.checkpoints._weight_files import CheckpointError, read_json
from torchtune.models import Description, Group, Llama3RopeScaling, build
from torchtune.training.parallel import LocalShard, full_slices
from torchtune.utils import atomic_directory, require, sign_of_life, write_json

# Texts that GGUF's known pre-tokenizers split differently.
_PROBES = ("It's 12345 o'clock,  isn't\n\n it? ", "naïve café 3.14 x=y+z;\t{a_b}", "WE'LL don't\r\n 2024年 日本語")
_BLOCK = 32  # consecutive elements of a row per scale, in every supported type


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
    for name, hf_architecture in ARCHITECTURES.items():
        if hf_architecture in spec.architectures:
            arch = name
    if arch is None or "gguf" not in spec.weight_maps:
        raise CheckpointError(
            f"quantizer: the family '{spec.name}' cannot be written as GGUF, only {', '.join(ARCHITECTURES)}: choose "
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
    return llama3_divisors(scaling, description.rope_base, description.head_dim)


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
    # The model may have more rows than the tokenizer has tokens.
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for text, index in vocab.items():
        if index >= vocab_size:
            raise CheckpointError(
                f"quantizer: {path} gives '{text}' the id {index}, but the model has {vocab_size} tokens: use the "
                "tokenizer of the model."
            )
        tokens[index] = text
        if text not in added_tokens:
            types[index] = NORMAL
        elif added_tokens[text]["special"]:
            types[index] = CONTROL
        else:
            types[index] = USER_DEFINED
    merges = []
    for merge in model["merges"]:
        is_pair = not isinstance(merge, str)  # in newer files; text in older ones
        merges.append(" ".join(merge) if is_pair else merge)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": "TemplateProcessing" in json.dumps(contents.get("post_processor")),
        **_tokenizer_settings(folder, vocab),
    }


def _tokenizer_settings(folder: Path, vocab: dict[str, int]) -> dict[str, Any]:
    """Return the metadata of special tokens and chat template in a folder."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    metadata: dict[str, Any] = {}
    for name, key in SPECIAL_IDS.items():
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
    for name, make_pre_tokenizer in pre_tokenizers().items():
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
