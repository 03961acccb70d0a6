"""Processor of images and videos of Gemma 4, and of Gemma 4 12B."""

import numpy as np
import pytest
import torch
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from tests.tiny_images import patches_by
from tests.torchtune.models.test_image_transform import picture, sizes
from tests.torchtune.models.test_tiled_images import import_rules  # noqa: F401
from torchtune.data import DataError, Video
from torchtune.models.gemma4_unified_vl._model_builders import UnifiedImages
from torchtune.models.gemma4_vl._processor import GemmaImages
from torchtune.modules.vision_tower import patch_places


@pytest.mark.parametrize("tokens", [70, 280, 1120])
def test_plan_is_that_of_transformers(tokens):
    settings = {"max_soft_tokens": tokens, "video_processor": {"max_soft_tokens": tokens}}
    processor = GemmaImages.from_config(settings, {})
    unified = UnifiedImages.from_config({"max_soft_tokens": 560, "video_processor": settings}, {})
    refused = 0
    for height, width in sizes(48, 48 * 48, tokens * 48 * 48):
        video = (width, height, 3, 2.0)
        try:
            wanted = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
        except ValueError:
            refused += 1
            for size in (video, video[:2]):
                with pytest.raises(DataError, match="cannot be resized"):
                    processor.plan(size)
            continue
        plan, frames, merged = processor.plan((width, height)), processor.plan(video), unified.plan(video)
        for one in (plan, frames, merged):
            assert (one.height, one.width) == wanted, (height, width)
        assert plan.tokens == wanted[0] * wanted[1] // 48**2 <= tokens
        assert frames.tokens == merged.tokens == 3 * plan.tokens
        assert frames.grids == ((3, wanted[0] // 16, wanted[1] // 16),)
        assert merged.grids == ((3, wanted[0] // 48, wanted[1] // 48),)
    assert tokens > 70 or refused == 0


SIZES = [(37, 50), (480, 960), (9, 200), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_patches_are_those_of_transformers(size):
    images = [picture(*size, seed=seed) for seed in range(2)]
    wanted = Gemma4ImageProcessorPil(max_soft_tokens=70)(images, return_tensors="np")
    processor = GemmaImages.from_config({"max_soft_tokens": 70}, {})
    plan, found = processor.plan(size), patches_by(processor, images[0]).numpy()
    assert plan.tokens == wanted["num_soft_tokens_per_image"][0]
    columns = plan.grids[0][2]
    row, column = patch_places(plan.grids, 3)[:2]
    theirs = wanted["pixel_values"][:, (row * columns + column).numpy()]
    assert np.abs((found + 1) / 2 - theirs[0]).max() <= 2 / 255
    assert processor.layout(plan) == "<|image>" + "<|image|>" * plan.tokens + "<image|>"
    frames = patches_by(processor, Video(tuple(images), 1.0)).numpy()  # 70 tokens a frame, too
    assert np.abs((frames + 1) / 2 - np.concatenate(list(theirs))).max() <= 2 / 255


@pytest.mark.parametrize("size", SIZES)
def test_patches_of_a_token_are_merged_as_by_transformers(size, import_rules):  # noqa: F811
    rules = import_rules("transformers.models.gemma4_unified.image_processing_gemma4_unified")
    image, processor = picture(*size), UnifiedImages.from_config({"max_soft_tokens": 70}, {})
    plan, found = processor.plan(size), patches_by(processor, image)
    small = Gemma4ImageProcessorPil(max_soft_tokens=70)([image], return_tensors="pt")
    patches, places = (small[name][:, : plan.tokens * 9] for name in ("pixel_values", "image_position_ids"))
    wanted, where = rules.patches_merge(patches, places, plan.tokens)
    assert (found - wanted[0]).abs().max() <= 2 / 255
    assert torch.equal(patch_places(plan.grids, 1)[:2].flip(0).T, where[0])


def test_other_colors_are_refused():
    for config in (
        {"do_normalize": True, "image_mean": [0.5] * 3},
        {"video_processor": {"do_normalize": True, "image_std": [0.5] * 3}},
    ):
        with pytest.raises(DataError, match="do_normalize = True, which is not supported"):
            GemmaImages.from_config(config, {})
