"""From one GGUF file to a standard Hugging Face folder."""

from pathlib import Path

import torch

from torchtune.models import build
from torchtune.training.checkpointing._export import write_config, write_model
from torchtune.training.checkpointing._gguf import GGUFFile
from torchtune.training.checkpointing._gguf_tokenizer import special_ids, write_tokenizer
from torchtune.training.checkpointing._load import load_base
from torchtune.utils import atomic_directory, write_json


def gguf_to_hf(gguf_file: str | Path, output_dir: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model and tokenizer of a GGUF file as a folder that Hugging Face's libraries load.

    Quantised weights come out as what they stand for, rounded to ``dtype``.

    Args:
        gguf_file: of the architecture llama, qwen2 or qwen3, with a byte-level BPE tokenizer.
        output_dir: written whole or not at all; one that exists is replaced.
        dtype: of the weights.

    Returns:
        ``output_dir``.

    Raises:
        CheckpointError: the file is corrupt or holds something that cannot be expressed.
    """
    import json

    file = GGUFFile(gguf_file)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = build(file.description, file.spec)
    finally:
        torch.set_default_dtype(previous)
    load_base(model, file, torch.device("cpu"))
    with atomic_directory(output_dir) as folder:
        write_model(model, folder, merge=False)
        write_config(model, folder, None)
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", {**config, **special_ids(file)})
        write_tokenizer(file, folder)
    return Path(output_dir)
