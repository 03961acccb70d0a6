"""What a checkpoint holds of one model: the files of tensors and the small files beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchtune.training.checkpointing._adapter import ADAPTER_CONFIG_FILE, ADAPTER_DIR, ADAPTER_FILE, adapter_entries
from torchtune.training.checkpointing._export import config_of_model, model_entries, shards
from torchtune.training.checkpointing._load import identity
from torchtune.training.checkpointing._model_source import ModelSource
from torchtune.training.checkpointing._owned_files import OWNED_INDEX, owned_exports
from torchtune.training.checkpointing._safetensors_file import TensorFile, tensor_file
from torchtune.training.checkpointing._sources import SAFETENSORS_INDEX
from torchtune.training.parallel._ranks import Ranks
from torchtune.utils import write_json


@dataclass(frozen=True)
class Export:
    """One model in a checkpoint.

    Attributes:
        source: where the model came from.
        folder: its subfolder, ``""`` for the checkpoint itself.
        contents: see :meth:`CheckpointStore.save`.
        files: files of tensors.
        json_files: contents of JSON files by their path.
    """

    source: ModelSource
    folder: str
    contents: frozenset[str]
    files: list[TensorFile]
    json_files: Mapping[str, Any]

    def write_small_files(self, checkpoint: Path) -> None:
        """Write the files without tensors, on one rank."""
        folder = checkpoint / self.folder
        for path, content in self.json_files.items():
            (checkpoint / path).parent.mkdir(parents=True, exist_ok=True)
            write_json(checkpoint / path, content)
        self.source.carry_files(folder)


def export_model(
    model: nn.Module, source: ModelSource, contents: frozenset[str], ranks: Ranks, max_shard_bytes: int, folder: str
) -> Export:
    """Describe what a checkpoint holds of a model; every rank makes its own shard when the files are written.

    Args:
        model: converted, sharded or not.
        source: where it came from; its tokenizer and other small files are exported too.
        contents: see :meth:`CheckpointStore.save`.
        ranks: all ranks.
        max_shard_bytes: larger models are split into several files.
        folder: subfolder of the checkpoint, ``""`` for the checkpoint itself.

    Raises:
        CheckpointError: a parameter has no name in Hugging Face's or PEFT's format.
    """
    merge, has_weights = "merged" in contents, bool(contents & {"model", "merged"})
    prefix = f"{folder}/" if folder else ""
    files, json_files = [], {}
    whole = None if identity(model)[1].is_classifier else source.whole(model)
    is_part = whole is not None and whole.is_multimodal
    if has_weights:
        files, index = shards(model_entries(model, ranks, merge=merge, whole=whole), max_shard_bytes, prefix)
        json_files |= {} if index is None else {prefix + SAFETENSORS_INDEX: index}
    if "adapter" in contents:
        entries, settings = adapter_entries(model, ranks, source.base_name(), whole if is_part else None)
        adapter_prefix = f"{prefix}{ADAPTER_DIR}/" if has_weights else prefix
        if entries:
            files.append(tensor_file(adapter_prefix + ADAPTER_FILE, entries))
            json_files[adapter_prefix + ADAPTER_CONFIG_FILE] = settings
        owned, index = owned_exports(model, ranks, source.base_name(), adapter_prefix)
        files += owned
        json_files |= {adapter_prefix + OWNED_INDEX: index} if owned else {}
    json_files[f"{prefix}config.json"] = config_of_model(model, source.checkpoint_dir, is_part=is_part)
    return Export(source, folder, contents, files, json_files)
