"""Image processor of Gemma 4."""

import numpy as np
import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from tests.tiny_images import patches_by
from tests.torchtune.models.test_image_transform import picture, sizes
from torchtune.data import DataError
from torchtune.models.gemma4_vl._processor import GemmaImages
from torchtune.modules.vision_tower import patch_places


@pytest.mark.parametrize("tokens", [70, 280, 1120])
def test_plan_is_that_of_transformers(tokens):
    processor = GemmaImages.from_config({"max_soft_tokens": tokens}, {})
    refused = 0
    for height, width in sizes(48, 48 * 48, tokens * 48 * 48):
        try:
            wanted = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
        except ValueError:
            refused += 1
            with pytest.raises(DataError, match="cannot be resized"):
                processor.plan((width, height))
            continue
        plan = processor.plan((width, height))
        assert (plan.height, plan.width) == wanted, (height, width)
        assert plan.tokens == wanted[0] * wanted[1] // 48**2 <= tokens
    assert tokens > 70 or refused == 0


@pytest.mark.parametrize("size", [(37, 50), (480, 960), (9, 200), (1, 1)])
def test_patches_are_those_of_transformers(size):
    image = picture(*size)
    wanted = Gemma4ImageProcessorPil(max_soft_tokens=70)([image], return_tensors="np")
    processor = GemmaImages.from_config({"max_soft_tokens": 70}, {})
    plan, found = processor.plan(size), patches_by(processor, image).numpy()
    assert plan.tokens == wanted["num_soft_tokens_per_image"][0]
    columns = plan.grids[0][2]
    row, column = patch_places(plan.grids, 3)[:2]
    theirs = wanted["pixel_values"][0][(row * columns + column).numpy()]
    assert np.abs((found + 1) / 2 - theirs).max() <= 2 / 255
    assert processor.layout(plan) == [255_999, *[258_880] * plan.tokens, 258_882]
