"""Export of a model to a checkpoint: tensor files that other libraries load, configs and tokenizer files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchtune.checkpoints._adapter import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_DIR,
    ADAPTER_FILE,
    OWNED_INDEX,
    adapter_entries,
)
from torchtune.checkpoints._load_weights import read_json
from torchtune.checkpoints._model_source import ModelSource
from torchtune.checkpoints._model_weights import ModelWeights
from torchtune.checkpoints._safetensors_file import Entry, TensorFile, aligned, write_file
from torchtune.checkpoints._save_view import SaveView
from torchtune.checkpoints._saved_tokenizer import add_stop_tokens, save_tokenizer
from torchtune.checkpoints._sources import SAFETENSORS_INDEX
from torchtune.models import Description, ModelError, ModelSpec, text_config, with_text_config
from torchtune.modules.conversion import get_conversions
from torchtune.utils import write_json

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Export:
    """One model in a checkpoint.

    Attributes:
        source: source of the model.
        folder: subfolder of the model with a trailing slash; ``""`` for the checkpoint itself.
        files: tensor files.
        json_files: contents of JSON files by their path.
        generates: whether the model generates text, and is no classifier.
    """

    source: ModelSource
    folder: str
    files: list[TensorFile]
    json_files: Mapping[str, Any]
    generates: bool

    def write_small_files(self, checkpoint: Path, tokenizer: Any = None) -> None:
        """Write the files without tensors, on one rank.

        Args:
            checkpoint: folder of the checkpoint.
            tokenizer: tokenizer that trained; None copies the files of the source's tokenizer.
        """
        for path, content in self.json_files.items():
            (checkpoint / path).parent.mkdir(parents=True, exist_ok=True)
            write_json(checkpoint / path, content)
        folder = checkpoint / self.folder
        self.source.carry_files(folder, tokenizer=tokenizer is None)
        if tokenizer is None:
            return
        # peft and its users look for the tokenizer beside the adapter.
        with_adapter = [folder / ADAPTER_DIR] if (folder / ADAPTER_DIR).is_dir() else []
        save_tokenizer(tokenizer, [folder, *with_adapter], self.source.checkpoint_dir)
        if self.generates:
            add_stop_tokens(tokenizer, folder)


def export_model(view: SaveView, source: ModelSource, max_shard_bytes: int, folder: str) -> Export:
    """Describe the files of a model in a checkpoint; every rank creates its shards when the files are written.

    Args:
        view: weights of the model, and the choice of weights to write.
        source: source of the model. Its tokenizer and other small files are exported too. If the model is the text
            decoder of a multimodal checkpoint, the export has that checkpoint's names and its other towers, unchanged.
        max_shard_bytes: larger models are split into several files.
        folder: subfolder of the checkpoint with a trailing slash; ``""`` for the checkpoint itself.

    Raises:
        CheckpointError: a parameter has no name in Hugging Face's or PEFT's format.
    """
    spec, description = view.identity
    files, json_files, adapter_folder = [], {}, folder
    whole = None if description.is_classifier else source.whole(view.model)
    is_part = whole is not None and whole.is_multimodal
    if view.has_weights:
        weight_map = spec.weight_map("hf")
        weight_map = weight_map if whole is None else weight_map.prefixed(whole.prefixes)
        entries = [view.entry(group, turn) for turn, group in enumerate(weight_map.groups(description))]
        entries += [] if whole is None else whole.other_towers(view.ranks)
        files, index = shards(entries, max_shard_bytes, folder)
        json_files |= {} if index is None else {folder + SAFETENSORS_INDEX: index}
        adapter_folder = f"{folder}{ADAPTER_DIR}/"
    if view.has_adapter:
        base_name = source.base_name()
        entries, settings = adapter_entries(view, base_name, whole if is_part else None)
        if entries:
            files.append(TensorFile(adapter_folder + ADAPTER_FILE, entries))
            json_files[adapter_folder + ADAPTER_CONFIG_FILE] = settings
        kinds = {f"adapter_{kind.__name__}.safetensors": kind for kind in map(type, get_conversions(view.model))}
        for file, names in view.owned_files.items():
            entries = [view.entry_of(name, name, turn) for turn, name in enumerate(names)]
            files.append(TensorFile(adapter_folder + file, entries))
        if owned := {file: f"{kinds[file].__module__}.{kinds[file].__qualname__}" for file in view.owned_files}:
            index = {"base_model_name_or_path": base_name, "conversions": owned}
            json_files[adapter_folder + OWNED_INDEX] = index
    json_files[f"{folder}config.json"] = config_of_model(view, source.checkpoint_dir, is_part=is_part)
    return Export(source, folder, files, json_files, generates=not description.is_classifier)


def shards(entries: Iterable[Entry], max_shard_bytes: int, folder: str = "") -> tuple[list[TensorFile], dict | None]:
    """Return ``model.safetensors``, or shard files and the contents of their index.

    Args:
        entries: the tensors.
        max_shard_bytes: larger models are split into several files.
        folder: subfolder of the checkpoint, with a trailing slash.
    """
    split, size = [[]], 0
    for entry in aligned(entries):
        entry_size = sum(spec.nbytes for spec in entry.specs.values())
        if split[-1] and size + entry_size > max_shard_bytes:
            split.append([])
            size = 0
        split[-1].append(entry)
        size += entry_size
    if len(split) == 1:
        return [TensorFile(f"{folder}model.safetensors", split[0])], None
    files = [
        TensorFile(f"{folder}model-{number:05d}-of-{len(split):05d}.safetensors", shard)
        for number, shard in enumerate(split, 1)
    ]
    index = {name: file.path.removeprefix(folder) for file in files for name in file.specs}
    return files, {"metadata": {"total_size": sum(file.size for file in files)}, "weight_map": index}


def write_entries(entries: Iterable[Entry], folder: Path, max_shard_bytes: int) -> None:
    """Write entries on this rank alone, one at a time."""
    files, index = shards(entries, max_shard_bytes)
    for file in files:
        write_file(file, folder)
    if index is not None:
        write_json(folder / SAFETENSORS_INDEX, index)


def config_of_model(weights: ModelWeights, source_dir: Path, *, is_part: bool) -> dict:
    """Return the contents of ``config.json``: the source's, updated where the model differs.

    Args:
        weights: weights of the model, which determines the description, the dtype and the vocabulary size.
        source_dir: folder of the source.
        is_part: whether the model is the text decoder of a multimodal source; the file then describes the composite
            model.
    """
    spec, description = weights.identity
    embedding = weights.specs[next(name for name in weights.base if name.endswith("tok_embeddings.weight"))]
    config = config_of(spec, description, embedding.shape[0], embedding.dtype, source_dir)
    return with_text_config(read_json(source_dir / "config.json"), config) if is_part else config


def config_of(
    spec: ModelSpec, description: Description, vocab_size: int, dtype: torch.dtype, source_dir: Path | None
) -> dict:
    """Return the contents of a ``config.json``; see :func:`config_of_model`."""
    description = replace(description, vocab_size=vocab_size)
    source = None if source_dir is None else source_dir / "config.json"
    images = spec.builder is not None
    config = text_config(read_json(source), images) if source is not None and source.is_file() else {}
    if not _says(config, spec, description):
        # Drop fields with two spellings, which could contradict each other.
        config = {key: value for key, value in config.items() if key not in ("rope_parameters", "torch_dtype")}
        longest = config.get("max_position_embeddings")
        config |= spec.to_hf_config(description)
        if longest:
            config["max_position_embeddings"] = longest
    config.pop("quantization_config", None)  # the export is not quantized
    if spec.builder is None:
        config["vocab_size"] = vocab_size
    name = str(dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
    if "dtype" in config:
        config["dtype"] = name
    for part in (config.get("text_config"), config.get("vision_config")) if spec.builder is not None else ():
        part |= {key: name for key in ("dtype", "torch_dtype") if key in part}
    return config


def _says(config: dict, spec: ModelSpec, description: Description) -> bool:
    """Return whether a config describes this model, apart from context length and dropout."""
    if not config:
        return False
    try:
        theirs = spec.from_hf_config(config)
    except ModelError:
        return False
    same = {"max_seq_len": description.max_seq_len, "attn_dropout": description.attn_dropout}
    return replace(theirs, vocab_size=description.vocab_size, **same) == description
