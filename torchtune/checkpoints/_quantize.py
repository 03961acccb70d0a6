"""Quantize a checkpoint, one tensor at a time: compressed-tensors, which vLLM and ``transformers`` load, or GGUF."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from torchtune.checkpoints._export import MAX_SHARD_BYTES, config_of, write_tensors
from torchtune.checkpoints._gguf_convert import export_gguf
from torchtune.checkpoints._load import ModelSource, detect_format
from torchtune.checkpoints._model_weights import identity
from torchtune.checkpoints._quantized_files import PACKED, SCALE, SHAPE
from torchtune.checkpoints._save import TensorGroup, TensorSlice
from torchtune.checkpoints._weight_files import CheckpointError, WeightFiles, read_json
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
    _refuse_composite(model)
    if source is None:
        apply_conversions(model, [fake_quantization(quantizer, None, lambda: 0, 1)])
        return
    _require_quantizer(quantizer)
    _refuse_quantized(source)
    if isinstance(quantizer, Quantizer):
        check_group_size(quantizable_layers(model), quantizer.group_size)


def _require_quantizer(quantizer: Any) -> None:
    if isinstance(quantizer, Quantizer | GGUFQuantizer):
        return
    names = []
    for name in quantization.__all__:
        is_base_class = name == "Quantizer"
        if name.endswith("Quantizer") and "QAT" not in name and not is_base_class:
            names.append(name)
    raise UserError(f"quantizer: {type(quantizer).__name__} is not a quantizer: choose out of {', '.join(names)}.")


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
        >>> source = torchtune.checkpoints.ModelSource(checkpoint)
        >>> quantizer = torchtune.training.quantization.Int8WeightOnlyQuantizer()
        >>> torchtune.checkpoints.quantize_checkpoint(source, model, quantizer, folder / "int8")
        >>> (folder / "int8" / "config.json").is_file()
        True
    """
    _require_quantizer(quantizer)
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output_dir: {folder} is there already and is not overwritten: name a new folder.")
    if isinstance(quantizer, GGUFQuantizer):
        export_gguf(source, model, _checked_groups(source, model), quantizer.file_type, folder, dtype=dtype)
    else:
        write_compressed(source, model, quantizer, folder, device=device, dtype=dtype)
    trained_for = _quantizer_of_training(source.checkpoint_dir)
    if trained_for is not None and trained_for.layout != getattr(quantizer, "layout", None):
        get_logger().warning(
            f"{source.checkpoint_dir} was trained for {type(trained_for).__name__} with group_size "
            f"{trained_for.group_size}, and {folder} is quantized otherwise: expect other outputs than in training."
        )


def _quantizer_of_training(folder: Path) -> QATQuantizer | None:
    """Return the QAT quantizer that trained a checkpoint of this library."""
    path = folder / "torchtune_config.yaml"
    if not path.is_file():
        return None
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    component = settings.get("quantizer")
    if not isinstance(component, dict):
        return None
    class_name = str(component.get("_component_")).removeprefix(f"{quantization.__name__}.")
    cls = vars(quantization).get(class_name)
    if not isinstance(cls, type) or not issubclass(cls, QATQuantizer):
        return None
    return cls(**{key: value for key, value in component.items() if key != "_component_"})


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
    groups = _checked_groups(source, model)
    files = source.open(model)
    layers = quantizable_layers(model)
    check_group_size(layers, quantizer.group_size)
    quantized_names = _external_weights(groups, {f"{path}.weight" for path in layers})
    settings = _quantization_config(quantizer)
    tensors = []
    kept_dtype = dtype  # of the weights that are not quantized
    for group in groups:
        for name in group.external:
            shape = files.shape(name)
            first_element = files.read(name, tuple(slice(0, 1) for _ in shape))
            spec = torch.empty(shape, dtype=dtype or first_element.dtype, device="meta")
            if name in quantized_names:
                specs = _compressed_specs(quantizer, settings["format"], name, spec)
                compute = partial(
                    _compressed_slices, files, name, device, dtype, quantizer=quantizer, storage=settings["format"]
                )
            else:
                specs = {name: spec}
                compute = partial(_kept_slices, files, name, device, dtype)
                kept_dtype = spec.dtype
            tensors.append(TensorGroup(specs, compute, spec.itemsize))
    spec, description = identity(model)
    config = config_of(spec, description, description.vocab_size, kept_dtype, source.checkpoint_dir)
    with atomic_directory(output_dir) as folder:
        write_json(folder / "config.json", {**config, "quantization_config": settings})
        source.carry_files(folder)
        write_tensors(tensors, folder, MAX_SHARD_BYTES)


def _compressed_specs(quantizer: Quantizer, storage: str, name: str, spec: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that store a weight, on the meta device."""
    # Quantize one row to find their dtypes and widths.
    row = torch.zeros(1, *spec.shape[1:], dtype=spec.dtype)
    specs = {}
    for key, tensor in _compress(quantizer, storage, name, row).items():
        shape = (2,) if key.endswith(SHAPE) else (len(spec), tensor.shape[1])
        specs[key] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return specs


def _read_weight(files: WeightFiles, name: str, device: torch.device | str, dtype: torch.dtype | None) -> torch.Tensor:
    sign_of_life()
    tensor = files.read(name)
    return tensor.to(device, dtype or tensor.dtype)


def _kept_slices(
    files: WeightFiles, name: str, device: torch.device | str, dtype: torch.dtype | None
) -> list[TensorSlice]:
    """Read a weight that is not quantized."""
    return [TensorSlice.of(name, _read_weight(files, name, device, dtype).cpu())]


def _compressed_slices(
    files: WeightFiles,
    name: str,
    device: torch.device | str,
    dtype: torch.dtype | None,
    *,
    quantizer: Quantizer,
    storage: str,
) -> list[TensorSlice]:
    """Read a weight, and quantize it on the device."""
    weight = _read_weight(files, name, device, dtype)
    return [TensorSlice.of(key, tensor.cpu()) for key, tensor in _compress(quantizer, storage, name, weight).items()]


def _compress(quantizer: Quantizer, storage: str, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
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
    unsigned = torch.nn.functional.pad(unsigned, (0, -values.shape[1] % per_word))
    unsigned = unsigned.view(len(values), -1, per_word)  # [out, words, values of a word]
    packed = torch.zeros(unsigned.shape[:2], dtype=torch.int32, device=values.device)
    for position in range(per_word):  # the first value in the lowest bits
        packed |= unsigned[:, :, position] << (position * bits)
    return packed


def _quantization_config(quantizer: Quantizer) -> dict[str, Any]:
    """Return ``quantization_config`` of ``config.json`` in the format of the package ``compressed-tensors``."""
    group_size = quantizer.group_size
    sample, _ = quantizer.quantized(torch.zeros(1, group_size or 32))
    is_float = sample.dtype.is_floating_point
    weights: dict[str, Any] = {
        "num_bits": quantizer.bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "dynamic": False,
    }
    if group_size is None:
        weights["strategy"] = "channel"
    else:
        weights["strategy"] = "group"
        weights["group_size"] = group_size
    if quantizer.activations is None:
        inputs = None
        storage = "naive-quantized" if is_float else "pack-quantized"
    else:
        is_float8 = quantizer.activations == "float8"
        inputs = {
            "num_bits": 8,
            "type": "float" if is_float8 else "int",
            "symmetric": is_float8,
            "dynamic": True,
            "strategy": "token",
        }
        storage = "float-quantized" if is_float else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "score"],
        "kv_cache_scheme": None,
    }


def _refuse_composite(model: nn.Module) -> None:
    """Raise ``CheckpointError`` for a composite model, which has layers that cannot be quantized."""
    if text_decoder(model) is not model:
        raise CheckpointError(
            "quantizer: a model of text and images is not written quantized: leave the quantizer out, or train an "
            "adapter over a quantized base (QuantizeBase, qlora_*)."
        )


def _refuse_quantized(source: ModelSource) -> None:
    """Raise ``CheckpointError`` if the weights of a checkpoint are already quantized."""
    path = source.checkpoint_dir / "config.json"
    config: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    settings = config.get("quantization_config")
    if settings:
        raise CheckpointError(
            f"{path}: the weights are quantized already ({settings.get('quant_method', 'unknown method')}): give the "
            "folder of the model before that as checkpoint_dir."
        )


def _checked_groups(source: ModelSource, model: nn.Module) -> list[Group]:
    """Check a checkpoint before it is quantized; return the groups of its weight map.

    Raises:
        CheckpointError: it is already quantized, has other names than Hugging Face's, is multimodal, or does not fit
            the model.
    """
    _refuse_composite(model)
    _refuse_quantized(source)
    source.check(model)
    files = source.open(model)
    spec, description = identity(model)
    name_format = detect_format(files, spec, description)
    if name_format != "hf":
        raise CheckpointError(
            f"checkpoint_dir: {source.checkpoint_dir} has the names of the format '{name_format}': quantize a "
            "checkpoint in Hugging Face's layout, as every training recipe writes."
        )
    if source.enclosing_checkpoint(model) is not None:
        raise CheckpointError(
            f"checkpoint_dir: {source.checkpoint_dir} has more parts than a text decoder, which are not quantized: set "
            "checkpointer.text_only to True to write the decoder alone."
        )
    return spec.weight_map("hf").select(files.names(), description)


def _external_weights(groups: list[Group], chosen: set[str]) -> set[str]:
    """Return the Hugging Face names of the weights ``chosen`` by this library's names.

    Raises:
        ConversionError: a tensor holds both chosen and other weights.
    """
    names = set()
    for group in groups:
        chosen_in_group = chosen.intersection(group.tune)
        if not chosen_in_group:
            continue
        if len(chosen_in_group) < len(group.tune):
            raise ConversionError(
                f"quantizer: '{group.external[0]}' holds more than linear layers: it is not quantized."
            )
        names.update(group.external)
    return names
