"""How many elements of activations the layers of a model keep for the backward pass, by their shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune.modules.conversion import full_shapes
from torchtune.modules.mixers import RecurrentMixer
from torchtune.modules.moe import MoE
from torchtune.modules.transformer import TransformerSelfAttentionLayer, text_decoder


def elements_per_token(model: torch.nn.Module) -> tuple[int, int, int]:
    """(mean elements of a layer, width, layers) from the shapes of the layers."""
    decoder = text_decoder(model)
    layers = list(getattr(decoder, "layers", []))
    if not layers:
        return 0, 0, 0
    width = decoder.tok_embeddings.weight.shape[1]
    return _mean_of_layers(layers, width, full_shapes(model)), width, len(layers)


def image_elements(model: torch.nn.Module, *, recomputed: bool) -> int:
    """Elements that an encoder keeps of an image of the largest size; 0 without one, or if nothing in it is trained.

    Args:
        model: converted, with what is trained requiring gradients.
        recomputed: whether activations of layers are recomputed.
    """
    encoder = getattr(model, "encoder", None)
    clip = getattr(encoder, "clip", None)
    if clip is None or not any(parameter.requires_grad for parameter in encoder.parameters()):
        return 0
    layers = [module for module in encoder.modules() if isinstance(module, TransformerSelfAttentionLayer)]
    width = clip.conv.out_channels
    by_layer = _mean_of_layers(layers, width, full_shapes(model))
    kept = by_layer + width * len(layers) if recomputed else by_layer * len(layers)
    return clip.max_num_tiles * clip.get_image_tokens_per_tile() * kept


def _mean_of_layers(layers: Sequence[Any], width: int, shapes: Mapping[torch.nn.Parameter, tuple[int, ...]]) -> int:
    total = sum(_mixer_elements(mixer, shapes) for layer in layers for mixer in layer.mixers)
    total += sum(4 * _inner_width(layer.mlp, width) for layer in layers if layer.mlp is not None)
    return 4 * width + total // len(layers)


def _mixer_elements(mixer: torch.nn.Module, shapes: Mapping[torch.nn.Parameter, tuple[int, ...]]) -> int:
    rows = {name: shapes[child.weight][0] for name, child in mixer.named_children() if name.endswith("_proj")}
    if not isinstance(mixer, RecurrentMixer):
        return 2 * rows["q_proj"] + 4 * (rows.get("k_proj") or rows.get("kv_proj", 0))
    inputs = sum(rows.values()) - rows["output_proj"]
    # Projected and convolved; what is read and its gate; a float32 state for every 64 positions.
    return 3 * inputs + 2 * shapes[mixer.output_proj.weight][1] + 2 * mixer.state_elements // 64


def _inner_width(mlp: torch.nn.Module, width: int) -> int:
    if not isinstance(mlp, MoE):
        return max((p.shape[0] for p in mlp.parameters() if p.dim() == 2), default=0)
    # The tokens once more for every chosen expert, before and after it.
    chosen = mlp.router.experts_per_token * (mlp.experts.hidden_dim + width // 2)
    return chosen + (0 if mlp.shared_expert is None else _inner_width(mlp.shared_expert, width))
