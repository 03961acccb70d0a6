"""Small random models of the families, in transformers and here, and the way between them."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.devices import DEVICE
from tests.torchtune.checkpoints.small import random_hf_model
from tests.torchtune.models.families import FAMILIES, SMALL
from torchtune.models import from_hf_config
from torchtune.modules import TransformerDecoder


@dataclass
class Pair:
    """The same random model twice, and the folder through which it went."""

    name: str
    hf: torch.nn.Module
    folder: Path
    model: TransformerDecoder


def load_model(folder: Path) -> TransformerDecoder:
    """Our model from a Hugging Face folder, in float32."""
    with torch.device("meta"):
        model = from_hf_config(folder)
    model.to_empty(device=DEVICE)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(dict(model.spec.weight_map("hf").to_tune(weights.items(), model.description)))
    return model.eval()


def write_model(model: TransformerDecoder, folder: Path) -> dict[str, torch.Tensor]:
    """Our model as a Hugging Face folder; returns what was written."""
    weights = dict(model.spec.weight_map("hf").to_external(model.state_dict().items(), model.description))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.spec.to_hf_config(model.description)
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 0}))
    return weights


# Rows and architectures whose files hold the experts of a layer together.
_FUSED = ("mistral4", "Mistral4", "llama4", "Llama4")
# Rows and architectures whose files call the matrices of experts as Mixtral's do.
_LIKE_MIXTRAL = ("mixtral", "Mixtral", "minimax_m2", "MiniMaxM2", "lfm2_moe", "Lfm2Moe")


def _granite4_name(name: str) -> str:
    for group, hf_group in (
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".router.weight", ".router.layer.weight"),
    ):
        name = name.replace(f"block_sparse_moe{group}", f"block_sparse_moe{hf_group}")
    return name


def on_disk(tensors: Iterable[tuple[str, torch.Tensor]], of: str = "") -> dict[str, torch.Tensor]:
    """Tensors of a model of transformers, ``of`` a row or an architecture, under the names of its files."""
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    block = "mlp"
    if of in _LIKE_MIXTRAL:
        gate, up, down = "w1", "w3", "w2"
        block = "block_sparse_moe"
    split_tensors = {}
    tensors = [(_granite4_name(name), tensor) for name, tensor in tensors]
    if any(".mixer." in name for name, _ in tensors):  # of Nemotron
        tensors = [(name.replace("model.", "backbone."), tensor) for name, tensor in tensors]
    names = {name for name, _ in tensors}
    for key, tensor in tensors:
        name = key.replace(".mlp.", f".{block}.")
        path, _, leaf = name.rpartition(".")
        is_mlp = ".mlp." in key or ".feed_forward." in key
        if ".mixer.experts." in key:
            split_tensors |= {f"{path}.{expert}.{leaf}.weight": matrix for expert, matrix in enumerate(tensor)}
        elif f"{path}.gate_up_proj_bias" in names or not is_mlp or of in _FUSED:  # and gpt-oss, Gemma
            split_tensors[key] = tensor
        elif leaf == "gate_up_proj" and tensor.dim() == 3:
            for expert, matrix in enumerate(tensor):
                gate_matrix, up_matrix = matrix.chunk(2)
                split_tensors[f"{path}.{expert}.{gate}.weight"] = gate_matrix
                split_tensors[f"{path}.{expert}.{up}.weight"] = up_matrix
        elif leaf == "down_proj" and tensor.dim() == 3:
            split_tensors |= {f"{path}.{expert}.{down}.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            split_tensors[name] = tensor
    return split_tensors


def make_hf_model(name: str, task: str = "ForCausalLM", **more: Any) -> torch.nn.Module:
    """A small random model of transformers, of a row; ``more`` goes into its config."""
    architecture, options = FAMILIES[name]
    return random_hf_model(architecture, {**SMALL, **options, **more}, task)


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One row of the table, as models."""
    folder = tmp_path_factory.mktemp(request.param)
    hf = make_hf_model(request.param)
    hf.save_pretrained(folder)
    hf.to(DEVICE)
    return Pair(request.param, hf, folder, load_model(folder))


@pytest.fixture
def save_model() -> Callable[[TransformerDecoder, Path], dict[str, torch.Tensor]]:
    """:func:`write_model`."""
    return write_model
