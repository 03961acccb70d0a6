"""Writing weights as folders that other tools load."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from torchtune.models import WeightMapError
from torchtune.modules.conversion import get_conversions
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._load import ADAPTER_CONFIG_FILE, ADAPTER_FILE, is_adapter_key, spec_map
from torchtune.training.checkpointing._sources import SAFETENSORS_INDEX
from torchtune.utils import write_json

MAX_SHARD_BYTES = 5 * 10**9
# Never carried from the source folder into what is saved: weights, and what is written anew.
_LEFT_BEHIND = (".pt", ".pth", ".bin", ".safetensors", ".gguf", ".ckpt", ".index.json", ".distcp")
_MAX_CARRIED_BYTES = 100 * 2**20


def _base_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    own = is_adapter_key(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not own(name)}


def _merged(model: nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    for conversion in get_conversions(model):
        if hasattr(conversion, "merged"):
            weight = conversion.merged(name, weight, model)
    return weight


def _external_groups(model: nn.Module) -> tuple[list[tuple[tuple[str, ...], Any]], dict[str, torch.Tensor]]:
    """(names in the file, how to make them) of every group, and the tensors that have them as they are."""
    weight_map, description = spec_map(model, "hf")
    return [(group.external, group) for group in weight_map.groups(description)], _base_parameters(model)


def write_model(model: nn.Module, folder: Path, *, merge: bool, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the base weights under Hugging Face names: one safetensors file, or shards with an index.

    Besides the model itself no more than one shard is held.

    Args:
        model: its adapters are left out, or with ``merge`` added to the weights.
        folder: exists.
        merge: see above.
        max_shard_bytes: larger models are split.

    Raises:
        CheckpointError: the model has parameters that its weight map does not know.
    """
    groups, parameters = _external_groups(model)
    known = {name for _, group in groups for name in group.tune}
    if unknown := sorted(parameters.keys() - known):
        raise CheckpointError(f"The parameter '{unknown[0]}' has no name in Hugging Face's format: it cannot be saved.")
    shards: list[list[Any]] = [[]]
    size = total = 0
    for _, group in groups:
        group_size = sum(parameters[name].numel() * parameters[name].element_size() for name in group.tune)
        if shards[-1] and size + group_size > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group_size
        total += group_size
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(_shard_tensors(model, shard, parameters, merge))
        save_tensors(tensors, folder / name)
        index.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        write_json(folder / SAFETENSORS_INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _shard_tensors(
    model: nn.Module, shard: list[Any], parameters: dict[str, torch.Tensor], merge: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for group in shard:
        ours = [_merged(model, name, parameters[name]) if merge else parameters[name] for name in group.tune]
        for name, tensor in zip(group.external, group.to_external(ours), strict=True):
            yield name, tensor.detach().contiguous().cpu()


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the disk is full, as every other writer of files says it.
    """
    from safetensors import SafetensorError

    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes its files private
    except SafetensorError as error:
        if shutil.disk_usage(path.parent).free < sum(t.numel() * t.element_size() for t in tensors.values()):
            import errno

            raise OSError(errno.ENOSPC, "No space left on device", str(path)) from error
        raise CheckpointError(f"{path} could not be written: {error}.") from error


def write_adapter(model: nn.Module, folder: Path, base_name: str | None) -> None:
    """Write the adapter as ``peft`` reads it.

    Args:
        model: has a conversion that knows its ``peft_config``.
        folder: exists.
        base_name: ``base_model_name_or_path``: the repository or folder of the base.

    Raises:
        CheckpointError: a layer has no name of its own in Hugging Face's format.
    """
    weight_map, description = spec_map(model, "hf")
    own = is_adapter_key(model)
    ours = ((name, p.detach()) for name, p in model.named_parameters() if own(name))
    tensors = {
        name: tensor.contiguous().cpu()
        for name, tensor in weight_map.peft().to_external(ours, description, partial=True)
    }
    settings: dict[str, Any] = {}
    for conversion in get_conversions(model):
        if hasattr(conversion, "peft_config"):
            settings |= conversion.peft_config(model)
    try:
        names = [weight_map.external_module(name, description) for name in settings.pop("target_modules")]
    except WeightMapError as error:
        raise CheckpointError(f"The adapter cannot be saved for peft: {error}") from error
    settings["target_modules"] = _shortest(names, weight_map, description)
    save_tensors(tensors, folder / ADAPTER_FILE)
    write_json(
        folder / ADAPTER_CONFIG_FILE,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            **settings,
        },
    )


def _shortest(names: list[str], weight_map: Any, description: Any) -> list[str]:
    """Last parts of module names (``q_proj``), if these choose the same modules; else the whole names."""
    leaves = sorted({name.rpartition(".")[2] for name in names})
    modules = [
        name.removesuffix(".weight")
        for group in weight_map.groups(description)
        for name in group.external
        if name.endswith(".weight")
    ]
    chosen = {name for name in modules if name.rpartition(".")[2] in leaves}
    return leaves if chosen == set(names) else sorted(names)


def write_config(model: nn.Module, folder: Path, source_dir: Path | None) -> None:
    """Write ``config.json``: the source's, with the dtype and vocabulary of what is saved, or one made by the spec."""
    source = None if source_dir is None else source_dir / "config.json"
    if source is not None and source.is_file():
        config = json.loads(source.read_text(encoding="utf-8"))
    else:
        config = model.spec.to_hf_config(model.description)
    dtype = str(model.tok_embeddings.weight.dtype).removeprefix("torch.")
    config["vocab_size"] = model.tok_embeddings.weight.shape[0]
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    write_json(folder / "config.json", config)


def carry_files(source_dir: Path, folder: Path) -> None:
    """Copy tokenizer, template, generation settings and other small files of the source; nothing is overwritten."""
    for path in sorted(source_dir.rglob("*")):
        relative = path.relative_to(source_dir)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or not path.is_file() or path.stat().st_size > _MAX_CARRIED_BYTES:
            continue
        left = path.name.endswith(_LEFT_BEHIND) or path.name.startswith(("adapter_config", "adapter_model"))
        run = relative.parts[0].startswith(("epoch_", "step_")) or path.name == "torchtune_config.yaml"
        target = folder / relative
        if left or run or path.name == "config.json" or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
