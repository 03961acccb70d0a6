"""Convert checkpoints to GGUF files for llama.cpp (written by the optional package ``gguf``), and back.

The files have the architectures, names and layouts that :mod:`torchtune.checkpoints._gguf` reads.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._export import MAX_SHARD_BYTES, config_of, write_entries
from torchtune.checkpoints._gguf import (
    ARCHITECTURES,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    GGUFFile,
    llama3_divisors,
    pre_tokenizers,
    special_ids,
    tokenizer_files,
)
from torchtune.checkpoints._load import ModelSource, check_base
from torchtune.checkpoints._model_weights import SaveView, identity
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
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint as one GGUF file, one tensor at a time.

    Matrices are stored as ``file_type``; embedding and output projection with at least 8 bits; vectors in float32.

    Args:
        source: checkpoint with Hugging Face names and a ``tokenizer.json``.
        model: model of the checkpoint; its values are not read.
        groups: groups of the checkpoint's weight map.
        file_type: see :class:`torchtune.training.quantization.GGUFQuantizer`.
        output_dir: folder for ``model-<file_type>.gguf`` and the tokenizer's files, written atomically.
        dtype: dtype to which weights are rounded before they are quantized; by default the checkpoint's.

    Raises:
        CheckpointError: GGUF does not support the model or its tokenizer, or the checkpoint does not fit the model.
        UserError: the ``gguf`` package is not installed, or the disk is full.
    """
    gguf = require("gguf", extra="gguf", purpose="Writing GGUF")
    spec, description = identity(model)
    arch = next((name for name, hf in ARCHITECTURES.items() if hf in spec.architectures), None)
    if arch is None or "gguf" not in spec.weight_maps:
        raise CheckpointError(
            f"quantizer: the family '{spec.name}' cannot be written as GGUF, only {', '.join(ARCHITECTURES)}: choose "
            "another quantizer."
        )
    names = {group.tune[0]: group.external[0] for group in spec.weight_map("gguf").groups(description)}
    kinds = {}
    for group in groups:
        for name in group.tune:
            kinds[name] = _kind(gguf, name, model.get_parameter(name).shape, file_type)
    metadata = {**_sizes(description, arch), **_tokenizer(gguf, source.checkpoint_dir, description.vocab_size)}
    opened = source.open()
    with atomic_directory(output_dir) as folder:
        source.carry_files(folder)
        writer = gguf.GGUFWriter(folder / f"model-{file_type}.gguf", arch)
        writer.add_name(source.checkpoint_dir.resolve().name)
        writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if file_type == 'F32' else 'MOSTLY'}_{file_type}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in metadata.items():
            _add(writer, key, value)
        divisors = _divisors(description)
        if divisors is not None:
            writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.numpy().dtype, 4 * len(divisors))
        for name, kind in kinds.items():
            shape = gguf.quants.quant_shape_to_byte_shape(tuple(model.get_parameter(name).shape), kind)
            size = torch.Size(shape).numel()
            writer.add_tensor_info(names[name], shape, torch.empty(0, dtype=torch.uint8).numpy().dtype, size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(divisors.numpy())
        for group in groups:
            read = [opened.read(name) for name in group.external]
            tensors = group.to_tune([tensor if dtype is None else tensor.to(dtype) for tensor in read])
            for name, tensor in zip(group.tune, tensors, strict=True):
                sign_of_life()
                writer.write_tensor_data(gguf.quants.quantize(tensor.float().contiguous().numpy(), kinds[name]))
        writer.close()


def _kind(gguf: ModuleType, name: str, shape: torch.Size, file_type: str) -> Any:
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if file_type.startswith("Q"):
        if shape[-1] % _BLOCK:
            raise CheckpointError(
                f"quantizer: {file_type} stores rows in blocks of {_BLOCK}, which do not divide the {shape[-1]} inputs "
                f"of '{name}': choose F16 or BF16."
            )
        if name in ("tok_embeddings.weight", "output.weight"):
            file_type = "Q8_0"
    return gguf.GGMLQuantizationType[file_type]


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _sizes(d: Description, arch: str) -> dict[str, Any]:
    return {
        f"{arch}.{key}": value
        for key, value in {
            "vocab_size": d.vocab_size,
            "context_length": d.max_seq_len,
            "embedding_length": d.embed_dim,
            "block_count": d.num_layers,
            "feed_forward_length": d.intermediate_dim,
            "attention.head_count": d.num_heads,
            "attention.head_count_kv": d.num_kv_heads,
            "attention.key_length": d.head_dim,
            "attention.value_length": d.head_dim,
            "attention.layer_norm_rms_epsilon": float(d.norm_eps),
            "rope.dimension_count": d.head_dim,
            "rope.freq_base": float(d.rope_base),
        }.items()
    }


def _divisors(d: Description) -> torch.Tensor | None:
    """Return Llama 3.1's scaling as one divisor per frequency. Raises ``CheckpointError`` for another scaling."""
    if d.rope_scaling is None:
        return None
    if not isinstance(d.rope_scaling, Llama3RopeScaling):
        raise CheckpointError(f"quantizer: {type(d.rope_scaling).__name__} cannot be written as GGUF.")
    return llama3_divisors(d.rope_scaling, d.rope_base, d.head_dim)


def _tokenizer(gguf: ModuleType, folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of the tokenizer in ``tokenizer.json``, which must be a byte-level BPE."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"quantizer: there is no {path}, whose vocabulary a GGUF file needs: put it there.")
    contents = read_json(path)
    model = contents.get("model", {})
    pre = _name_of_pre_tokenizer(Tokenizer.from_file(str(path))) if model.get("type") == "BPE" else None
    if pre is None or model.get("byte_fallback"):
        raise CheckpointError(
            f"quantizer: {path} is no byte-level BPE that cuts text in a way that GGUF has a name for: choose a "
            "quantizer that writes safetensors."
        )
    vocab = dict(model["vocab"])
    added = {token["content"]: token for token in contents.get("added_tokens", ())}
    vocab |= {text: token["id"] for text, token in added.items()}
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for text, index in vocab.items():
        tokens[index] = text
        kinds[index] = NORMAL if text not in added else CONTROL if added[text]["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": "TemplateProcessing" in json.dumps(contents.get("post_processor")),
    }
    return found | _special(folder, vocab)


def _special(folder: Path, vocab: dict[str, int]) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    found: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in vocab:
            found[f"tokenizer.ggml.{key}_token_id"] = vocab[token]
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    return found | ({"tokenizer.chat_template": text} if isinstance(text, str) else {})


def _name_of_pre_tokenizer(tokenizer: Any) -> str | None:
    """Return the ``tokenizer.ggml.pre`` of a tokenizer's pre-tokenizer."""
    if tokenizer.pre_tokenizer is None:
        return None
    cut = [tokenizer.pre_tokenizer.pre_tokenize_str(text) for text in _PROBES]
    for name, make in pre_tokenizers().items():
        if [make().pre_tokenize_str(text) for text in _PROBES] == cut:
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
    spec, description = file.spec, file.description
    with torch.device("meta"):
        model = build(description, spec).to(dtype)
    view = _GGUFView(model, file)
    check_base(view, file)
    entries = [view.entry(group, 0) for group in spec.weight_map("hf").groups(description)]
    with atomic_directory(output_dir) as folder:
        config = config_of(spec, description, description.vocab_size, dtype, None)
        write_json(folder / "config.json", {**config, **special_ids(file)})
        for name, content in tokenizer_files(file).items():
            write_json(folder / name, content)
        write_entries(entries, folder, MAX_SHARD_BYTES)
    return Path(output_dir)


class _GGUFView(SaveView):
    """View of a model on the meta device that reads each weight from a GGUF file when it is written."""

    def __init__(self, model: nn.Module, file: GGUFFile) -> None:
        super().__init__(model, frozenset({"model"}))
        self._file = file
        groups = file.spec.weight_map("gguf").groups(file.description)
        self._read_from = {name: group for group in groups for name in group.tune}

    def shard(self, name: str, turn: int) -> LocalShard:
        """Read a full weight."""
        group, spec = self._read_from[name], self.specs[name]
        tensors = group.to_tune([self._file.read(external) for external in group.external])
        weight = tensors[group.tune.index(name)].to(spec.dtype)
        return LocalShard(spec, full_slices(weight.shape), weight, is_writer=True)
