"""From a checkpoint to a quantised one, one tensor at a time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtune.models import Group, WeightMapError
from torchtune.modules import text_decoder
from torchtune.modules.conversion import ConversionError
from torchtune.modules.fake_quant import check_group_size, quantizable_layers
from torchtune.training.checkpointing._compressed_tensors import quantization_config, quantized_entry
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._export import MAX_SHARD_BYTES, config_of, write_entries
from torchtune.training.checkpointing._load import detect_format, identity, read_json
from torchtune.training.checkpointing._model_source import ModelSource
from torchtune.training.checkpointing._open_source import without_untrained
from torchtune.training.checkpointing._safetensors_file import Entry, TensorSlice
from torchtune.training.checkpointing._sources import Source
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
    """Write the weights of a checkpoint quantised, with its tokenizer and other small files.

    Args:
        source: bears Hugging Face's names.
        model: what the checkpoint is, on any device; its values are not read.
        quantizer: decides values and layout: compressed-tensors.
        output_dir: written atomically; a folder that is there is replaced.
        device: where weights are quantised, one at a time.
        dtype: of what is not quantised, and of the weights before they are; that of the checkpoint by default.

    Raises:
        CheckpointError: the checkpoint is quantised already, has other towers than text, or does not fit the model.
        ConversionError: the group size does not divide a width, or the model has experts.
        UserError: the disk is full.
    """
    refuse_quantized(source)
    source.check(model)
    opened, groups = source.open(), checked_groups(source, model)
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
    """Raise ``CheckpointError`` for a model of several parts, whose files name layers that are not quantised."""
    if text_decoder(model) is not model:
        raise CheckpointError(
            "quantizer: a model of text and images is not written quantised: leave the quantizer out, or train an "
            "adapter over a quantised base (QuantizeBase, qlora_*)."
        )


def refuse_quantized(source: ModelSource) -> None:
    """Raise ``CheckpointError`` where the weights of a checkpoint are quantised already."""
    config = source.checkpoint_dir / "config.json"
    method = read_json(config).get("quantization_config") if config.is_file() else None
    if method:
        raise CheckpointError(
            f"{config}: the weights are quantised already ({method.get('quant_method', 'unknown method')}): give the "
            "folder of the model before that as checkpoint_dir."
        )


def checked_groups(source: ModelSource, model: nn.Module) -> list[Group]:
    """The groups of the weight map of a checkpoint with Hugging Face's names.

    Raises:
        CheckpointError: it has others, other towers than text, or does not fit the model.
    """
    refuse_parts(model)
    opened, (spec, description) = source.open(), identity(model)
    kind = detect_format(opened, spec, description)
    if kind != "hf":
        raise CheckpointError(
            f"checkpoint_dir: {source.checkpoint_dir} has the names of the format '{kind}': quantise a checkpoint in "
            "Hugging Face's layout, as every training recipe writes."
        )
    if source.whole(model) is not None:
        raise CheckpointError(
            f"checkpoint_dir: {source.checkpoint_dir} has more parts than a text decoder, which are not quantised: set "
            "checkpointer.text_only to True to write the decoder alone."
        )
    try:
        return spec.weight_map("hf").select(without_untrained(opened, spec, description).names(), description)
    except WeightMapError as error:
        raise CheckpointError(f"{source.checkpoint_dir}: {error}") from error


def _external_weights(groups: list[Group], chosen: set[str]) -> set[str]:
    """Hugging Face's names of the weights that are ``chosen`` by ours.

    Raises:
        ConversionError: a tensor holds chosen weights and others.
    """
    found = set()
    for group in groups:
        inside = chosen.intersection(group.tune)
        if inside and len(inside) < len(group.tune):
            raise ConversionError(
                f"quantizer: '{group.external[0]}' holds more than linear layers: it is not quantised."
            )
        found |= set(group.external) if inside else set()
    return found


def _read(opened: Source, name: str, device: torch.device | str, dtype: torch.dtype | None) -> torch.Tensor:
    sign_of_life()
    tensor = opened.read(name)
    return tensor.to(device, dtype or tensor.dtype)


def _plain_entry(name: str, spec: torch.Tensor, read: Callable[[], torch.Tensor]) -> Entry:
    return Entry({name: spec}, lambda: [TensorSlice.of(name, read())])
