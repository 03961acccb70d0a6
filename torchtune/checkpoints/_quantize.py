"""Quantize a checkpoint, one tensor at a time: compressed-tensors, which vLLM and ``transformers`` load, or GGUF."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from torchtune.checkpoints._export import MAX_SHARD_BYTES, config_of, write_entries
from torchtune.checkpoints._gguf_convert import export_gguf
from torchtune.checkpoints._load import ModelSource, detect_format
from torchtune.checkpoints._model_weights import identity
from torchtune.checkpoints._quantized_files import PACKED, SCALE, SHAPE
from torchtune.checkpoints._save import Entry, TensorSlice
from torchtune.checkpoints._weight_files import CheckpointError, Source, read_json
from torchtune.models import Group
from torchtune.modules import text_decoder
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.fake_quant import check_group_size, quantizable_layers
from torchtune.training import quantization
from torchtune.training.quantization import GGUFQuantizer, QATQuantizer, Quantizer, fake_quantization
from torchtune.utils import UserError, atomic_directory, get_logger, sign_of_life, write_json


def check_quantizer(quantizer: Any, model: nn.Module, source: ModelSource | None = None) -> None:
    """Check that a quantizer fits a model, before weights and data are read.

    Args:
        quantizer: the quantizer of the config.
        model: model on the meta device; converted if ``source`` is None.
        source: checkpoint to quantize; None for quantization-aware training.

    Raises:
        UserError: ``quantizer`` does not fit or is not a quantizer, or the checkpoint is already quantized.
    """
    _refuse_parts(model)
    if source is None:
        apply_conversions(model, [fake_quantization(quantizer, None, lambda: 0, 1)])
        return
    _require_quantizer(quantizer)
    _refuse_quantized(source)
    if isinstance(quantizer, Quantizer):
        check_group_size(quantizable_layers(model), quantizer.group_size)


def _require_quantizer(quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer | GGUFQuantizer):
        names = [name for name in quantization.__all__ if name.endswith("Quantizer") and "QAT" not in name]
        known = ", ".join(name for name in names if name != "Quantizer")
        raise UserError(f"quantizer: {type(quantizer).__name__} is no quantizer: choose out of {known}.")


def quantize_checkpoint(
    source: ModelSource,
    model: nn.Module,
    quantizer: Any,
    output_dir: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Write a quantized checkpoint, one tensor at a time, with its tokenizer and other small files.

    Args:
        source: the checkpoint, with Hugging Face names.
        model: model of the checkpoint, on the meta device; its values are not read.
        quantizer: a :class:`Quantizer`, for compressed-tensors, or a :class:`GGUFQuantizer`.
        output_dir: new folder, written atomically.
        device: device that quantizes the weights.
        dtype: dtype of the other weights, and of weights before they are quantized; by default the checkpoint's.

    Raises:
        UserError: the folder is not empty, ``quantizer`` is not a quantizer, or the checkpoint does not fit it.

    Example:
        >>> source = torchtune.training.ModelSource(checkpoint)
        >>> quantizer = torchtune.training.quantization.Int8WeightOnlyQuantizer()
        >>> torchtune.training.quantize_checkpoint(source, model, quantizer, folder / "int8")
        >>> (folder / "int8" / "config.json").is_file()
        True
    """
    _require_quantizer(quantizer)
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output_dir: {folder} is there already and is not overwritten: name a new folder.")
    if isinstance(quantizer, GGUFQuantizer):
        export_gguf(source, model, _groups(source, model), quantizer.file_type, folder, dtype=dtype)
    else:
        write_compressed(source, model, quantizer, folder, device=device, dtype=dtype)
    trained_for = _trained_for(source.checkpoint_dir)
    if trained_for and trained_for.layout != getattr(quantizer, "layout", None):
        get_logger().warning(
            f"{source.checkpoint_dir} was trained for {type(trained_for).__name__} with group_size "
            f"{trained_for.group_size}, and {folder} is quantized otherwise: expect other outputs than in training."
        )


def _trained_for(folder: Path) -> QATQuantizer | None:
    """Return the QAT quantizer that trained a checkpoint of this library."""
    path = folder / "torchtune_config.yaml"
    node = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("quantizer") if path.is_file() else None
    if not isinstance(node, dict):
        return None
    options = {key: value for key, value in node.items() if key != "_component_"}
    kind = vars(quantization).get(str(node.get("_component_")).removeprefix(f"{quantization.__name__}."))
    return kind(**options) if isinstance(kind, type) and issubclass(kind, QATQuantizer) else None


def write_compressed(
    source: ModelSource,
    model: nn.Module,
    quantizer: Quantizer,
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
    groups, opened = _groups(source, model), source.open(model)
    layers = quantizable_layers(model)
    check_group_size(layers, quantizer.group_size)
    weights = _external_weights(groups, {f"{path}.weight" for path in layers})
    settings = _quantization_config(quantizer)
    entries, kept_dtype = [], dtype
    for name in (name for group in groups for name in group.external):
        shape = opened.shape(name)
        stored = opened.read(name, tuple(slice(0, 1) for _ in shape)).dtype
        spec = torch.empty(shape, dtype=dtype or stored, device="meta")
        if name in weights:
            make = partial(_quantized, quantizer, settings["format"], name)
            # Quantize one row to find the dtypes and widths of the stored tensors.
            specs = {
                key: torch.empty(
                    (2,) if key.endswith(SHAPE) else (len(spec), row.shape[1]), dtype=row.dtype, device="meta"
                )
                for key, row in make(torch.zeros(1, *shape[1:], dtype=spec.dtype)).items()
            }
        else:
            make, specs, kept_dtype = partial(_unchanged, name), {name: spec}, spec.dtype
        entries.append(Entry(specs, partial(_slices, opened, name, device, dtype, make), spec.itemsize))
    spec, description = identity(model)
    config = config_of(spec, description, description.vocab_size, kept_dtype, source.checkpoint_dir)
    with atomic_directory(output_dir) as folder:
        write_json(folder / "config.json", {**config, "quantization_config": settings})
        source.carry_files(folder)
        write_entries(entries, folder, MAX_SHARD_BYTES)


def _slices(
    opened: Source,
    name: str,
    device: torch.device | str,
    dtype: torch.dtype | None,
    make: Callable[[torch.Tensor], dict[str, torch.Tensor]],
) -> list[TensorSlice]:
    sign_of_life()
    tensor = opened.read(name)
    made = make(tensor.to(device, dtype or tensor.dtype))
    return [TensorSlice.of(key, part.cpu()) for key, part in made.items()]


def _unchanged(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: weight}


def _quantized(quantizer: Quantizer, storage: str, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that store a weight, as ``_quantized_files`` describes them."""
    values, scale = quantizer.quantized(weight)
    if storage != "pack-quantized":
        return {name: values, name + SCALE: scale}
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {name + SHAPE: shape, name + PACKED: _pack(values, quantizer.bits), name + SCALE: scale}


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 ``[out, in]`` of ``bits`` (4 or 8) each into int32 ``[out, ceil(in · bits / 32)]``."""
    per_word = 32 // bits
    unsigned = values.to(torch.int32).add_(1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -values.shape[1] % per_word)).view(len(values), -1, per_word)
    packed = torch.zeros(unsigned.shape[:2], dtype=torch.int32, device=values.device)
    for place in range(per_word):
        packed |= unsigned[:, :, place] << (place * bits)
    return packed


def _quantization_config(quantizer: Quantizer) -> dict[str, Any]:
    group_size, activations = quantizer.group_size, quantizer.activations
    floating = quantizer.quantized(torch.zeros(1, group_size or 32))[0].dtype.is_floating_point
    storage = ("naive-quantized", "float-quantized") if floating else ("pack-quantized", "int-quantized")
    weights = {"num_bits": quantizer.bits, "type": "float" if floating else "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    inputs = None
    if activations is not None:
        inputs = {"num_bits": 8, "type": "float" if activations == "float8" else "int"}
        inputs |= {"symmetric": activations == "float8", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage[activations is not None],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "score"],
        "kv_cache_scheme": None,
    }


def _refuse_parts(model: nn.Module) -> None:
    """Raise ``CheckpointError`` for a composite model, which has layers that cannot be quantized."""
    if text_decoder(model) is not model:
        raise CheckpointError(
            "quantizer: a model of text and images is not written quantized: leave the quantizer out, or train an "
            "adapter over a quantized base (QuantizeBase, qlora_*)."
        )


def _refuse_quantized(source: ModelSource) -> None:
    """Raise ``CheckpointError`` if the weights of a checkpoint are already quantized."""
    config = source.checkpoint_dir / "config.json"
    method = read_json(config).get("quantization_config") if config.is_file() else None
    if method:
        raise CheckpointError(
            f"{config}: the weights are quantized already ({method.get('quant_method', 'unknown method')}): give the "
            "folder of the model before that as checkpoint_dir."
        )


def _groups(source: ModelSource, model: nn.Module) -> list[Group]:
    """Check a checkpoint before it is quantized; return the groups of its weight map.

    Raises:
        CheckpointError: it is already quantized, has other names than Hugging Face's, is multimodal, or does not fit
            the model.
    """
    _refuse_parts(model)
    _refuse_quantized(source)
    source.check(model)
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
    return spec.weight_map("hf").select(opened.names(), description)


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
