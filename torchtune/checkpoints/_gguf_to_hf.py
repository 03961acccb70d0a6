"""Convert a GGUF file to a Hugging Face folder."""

from pathlib import Path

import torch

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._export import MAX_SHARD_BYTES, config_of, write_entries
from torchtune.checkpoints._gguf import GGUFFile
from torchtune.checkpoints._gguf_tokenizer import special_ids, tokenizer_files
from torchtune.checkpoints._model_weights import check_shape
from torchtune.checkpoints._safetensors_file import Entry, TensorSlice
from torchtune.models import Group, WeightMapError, build
from torchtune.utils import atomic_directory, write_json


def gguf_to_hf(gguf_file: str | Path, output_dir: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model and tokenizer of a GGUF file as a folder that Hugging Face libraries load.

    Quantized weights are dequantized and rounded to ``dtype``, one tensor at a time.

    Args:
        gguf_file: file of the architecture llama, qwen2 or qwen3, with a byte-level BPE tokenizer.
        output_dir: output folder, written atomically; an existing one is replaced.
        dtype: dtype of the weights.

    Returns:
        ``output_dir``.

    Raises:
        CheckpointError: the file is corrupt or has unsupported contents.
        UserError: the ``gguf`` package is not installed, or the disk is full.
    """
    file = GGUFFile(gguf_file)
    entries = _entries(file, dtype)
    with atomic_directory(output_dir) as folder:
        config = config_of(file.spec, file.description, file.description.vocab_size, dtype, None)
        write_json(folder / "config.json", {**config, **special_ids(file)})
        for name, content in tokenizer_files(file).items():
            write_json(folder / name, content)
        write_entries(entries, folder, MAX_SHARD_BYTES)
    return Path(output_dir)


def _entries(file: GGUFFile, dtype: torch.dtype) -> list[Entry]:
    """Return the entries of ``model.safetensors``, each computed from tensors of the GGUF file."""
    spec, description = file.spec, file.description
    with torch.device("meta"):
        specs = {name: p.detach().to(dtype) for name, p in build(description, spec).named_parameters()}
    try:
        groups = spec.weight_map("gguf").select(file.names(), description)
    except WeightMapError as error:
        raise CheckpointError(f"{file.path}: {error}") from error
    sources = {name: group for group in groups for name in group.tune}
    for group in groups:
        for name, wanted in zip(group.external, group.to_external([specs[n] for n in group.tune]), strict=True):
            check_shape(file.path, name, torch.Size(file.shape(name)), wanted.shape)

    def ours(name: str) -> torch.Tensor:
        group = sources[name]
        tensors = group.to_tune([file.read(external) for external in group.external])
        return tensors[group.tune.index(name)].to(dtype)

    def entry(group: Group) -> Entry:
        def make() -> list[TensorSlice]:
            tensors = group.to_external([ours(name) for name in group.tune])
            return [TensorSlice.of(name, tensor) for name, tensor in zip(group.external, tensors, strict=True)]

        external = group.to_external([specs[name] for name in group.tune])
        return Entry(dict(zip(group.external, external, strict=True)), make)

    return [entry(group) for group in spec.weight_map("hf").groups(description)]
