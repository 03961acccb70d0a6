"""Quantize a checkpoint, one tensor at a time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._compressed_tensors import quantization_config, quantized_entry
from torchtune.checkpoints._export import MAX_SHARD_BYTES, config_of, write_entries
from torchtune.checkpoints._load_weights import detect_format, read_json
from torchtune.checkpoints._model_source import ModelSource
from torchtune.checkpoints._model_weights import identity
from torchtune.checkpoints._open_source import without_untrained
from torchtune.checkpoints._safetensors_file import Entry, TensorSlice
from torchtune.checkpoints._sources import Source
from torchtune.models import Group, WeightMapError
from torchtune.modules import text_decoder
from torchtune.modules.conversion import ConversionError
from torchtune.modules.fake_quant import check_group_size, quantizable_layers
from torchtune.utils import atomic_directory, sign_of_life, write_json

if TYPE_CHECKING:  # imports torchao's configurations
    from torchtune.training.quantization import Quantizer


def write_compressed(
    source: ModelSource,
    model: nn.Module,
    quantizer: "Quantizer",
    output_dir: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Write a quantized checkpoint in compressed-tensors format, with its tokenizer and other small files.

    Args:
        source: checkpoint with Hugging Face names.
        model: model of the checkpoint, on any device; its values are not read.
        quantizer: determines values and layout.
        output_dir: output folder, written atomically; an existing one is replaced.
        device: device that quantizes the weights, one at a time.
        dtype: dtype of the other weights, and of weights before they are quantized; by default the checkpoint's.

    Raises:
        CheckpointError: the checkpoint is already quantized, is multimodal, or does not fit the model.
        ConversionError: the group size does not divide a width, or the model has experts.
        UserError: the disk is full.
    """
    refuse_quantized(source)
    source.check(model)
    opened, groups = source.open(model), checked_groups(source, model)
    layers = quantizable_layers(model)
    check_group_size(layers, quantizer.group_size)
    weights = _external_weights(groups, {f"{path}.weight" for path in layers})
    probe = quantizer.quantized(torch.zeros(1, quantizer.group_size or 32))[0]
    settings = quantization_config(
        quantizer.bits, probe.dtype, quantizer.group_size, quantizer.activations, ("lm_head", "score")
    )
    entries, kept_dtype = [], dtype
    for name in (name for group in groups for name in group.external):
        read = partial(_read, opened, name, device, dtype)
        shape = opened.shape(name)
        stored = opened.read(name, tuple(slice(0, 1) for _ in shape)).dtype
        tensor = torch.empty(shape, dtype=dtype or stored, device="meta")
        if name in weights:
            entry = quantized_entry(name, tensor, quantizer.quantized, read, quantizer.bits, settings["format"])
        else:
            entry, kept_dtype = _plain_entry(name, tensor, read), tensor.dtype
        entries.append(entry)
    spec, description = identity(model)
    config = config_of(spec, description, description.vocab_size, kept_dtype, source.checkpoint_dir)
    with atomic_directory(output_dir) as folder:
        write_json(folder / "config.json", {**config, "quantization_config": settings})
        source.carry_files(folder)
        write_entries(entries, folder, MAX_SHARD_BYTES)


def refuse_parts(model: nn.Module) -> None:
    """Raise ``CheckpointError`` for a composite model, which has layers that cannot be quantized."""
    if text_decoder(model) is not model:
        raise CheckpointError(
            "quantizer: a model of text and images is not written quantized: leave the quantizer out, or train an "
            "adapter over a quantized base (QuantizeBase, qlora_*)."
        )


def refuse_quantized(source: ModelSource) -> None:
    """Raise ``CheckpointError`` if the weights of a checkpoint are already quantized."""
    config = source.checkpoint_dir / "config.json"
    method = read_json(config).get("quantization_config") if config.is_file() else None
    if method:
        raise CheckpointError(
            f"{config}: the weights are quantized already ({method.get('quant_method', 'unknown method')}): give the "
            "folder of the model before that as checkpoint_dir."
        )


def checked_groups(source: ModelSource, model: nn.Module) -> list[Group]:
    """Return the weight-map groups of a checkpoint with Hugging Face names.

    Raises:
        CheckpointError: it has other names, is multimodal, or does not fit the model.
    """
    refuse_parts(model)
    opened, (spec, description) = source.open(model), identity(model)
    kind = detect_format(opened, spec, description)
    if kind != "hf":
        raise CheckpointError(
            f"checkpoint_dir: {source.checkpoint_dir} has the names of the format '{kind}': quantize a checkpoint in "
            "Hugging Face's layout, as every training recipe writes."
        )
    if source.whole(model) is not None:
        raise CheckpointError(
            f"checkpoint_dir: {source.checkpoint_dir} has more parts than a text decoder, which are not quantized: set "
            "checkpointer.text_only to True to write the decoder alone."
        )
    try:
        return spec.weight_map("hf").select(without_untrained(opened, spec, description).names(), description)
    except WeightMapError as error:
        raise CheckpointError(f"{source.checkpoint_dir}: {error}") from error


def _external_weights(groups: list[Group], chosen: set[str]) -> set[str]:
    """Return the Hugging Face names of the weights ``chosen`` by this library's names.

    Raises:
        ConversionError: a tensor holds both chosen and other weights.
    """
    found = set()
    for group in groups:
        inside = chosen.intersection(group.tune)
        if inside and len(inside) < len(group.tune):
            raise ConversionError(
                f"quantizer: '{group.external[0]}' holds more than linear layers: it is not quantized."
            )
        found |= set(group.external) if inside else set()
    return found


def _read(opened: Source, name: str, device: torch.device | str, dtype: torch.dtype | None) -> torch.Tensor:
    sign_of_life()
    tensor = opened.read(name)
    return tensor.to(device, dtype or tensor.dtype)


def _plain_entry(name: str, spec: torch.Tensor, read: Callable[[], torch.Tensor]) -> Entry:
    return Entry({name: spec}, lambda: [TensorSlice.of(name, read())])
