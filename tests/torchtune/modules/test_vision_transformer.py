"""The vision tower of models with image tokens, where other tests do not reach."""

from pathlib import Path

import pytest
import torch

from torchtune.data import Images
from torchtune.data._ragged_images import CachedImage
from torchtune.models import ImageTextDescription, VisionDescription, build
from torchtune.models.qwen3_vl import SPEC
from torchtune.modules import vision_transformer

GRID = (1, 2, 4)  # 8 patches, 2 tokens


def modules_that_run(tower, images):
    """Return the names of the submodules that are called while the tower encodes images."""
    names = set()
    handles = []
    for name, module in tower.named_modules():
        handles.append(module.register_forward_hook(lambda *_, name=name: names.add(name)))
    tower(images)
    for handle in handles:
        handle.remove()
    return names


@pytest.mark.parametrize("trained", ["nothing", "projectors"])
def test_rank_with_cached_features_runs_every_module_that_other_ranks_gather(trained, monkeypatch):
    """A module may be sharded by itself (custom_sharded_layers), and its all-gather waits for all ranks."""
    vision = VisionDescription(
        patch_size=2,
        merge=2,
        num_layers=2,
        embed_dim=8,
        intermediate_dim=8,
        num_heads=2,
        output_dim=8,
        deep_layers=(0,),
    )
    text = {"vocab_size": 9, "num_layers": 1, "embed_dim": 8, "intermediate_dim": 8, "max_seq_len": 99}
    heads = {"num_heads": 2, "num_kv_heads": 2}
    tower = build(ImageTextDescription(**text, **heads, vision=vision, image_tokens=(7,)), SPEC).encoder
    tower.requires_grad_(False)
    if trained == "projectors":
        tower.projector.requires_grad_(True)
        features = torch.ones(8, 2 * 8)  # a row for each patch, values of the last layer and of a deep one
    else:
        features = torch.ones(2, 2 * 8)  # a row for each token
    monkeypatch.setattr(vision_transformer, "is_sharded", lambda module: True)

    width = tower.patch_embed.in_features
    of_other_ranks = modules_that_run(tower, Images(torch.zeros(8, width), (GRID,)))
    cached = CachedImage(Path("unread"), (GRID,), features, least_free=0)
    assert modules_that_run(tower, Images(torch.zeros(0, width), (GRID,), cached=(cached,))) == of_other_ranks
