"""Image processors of SmolVLM 2, Llama 4 and Mistral 3."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.tiny_images import patches_by, pixels_of, squares
from tests.torchtune.models.test_image_transform import picture, sizes
from tests.torchtune.models.tokenizer_files import write_ranks
from torchtune.data import DataError, Message, collate_documents
from torchtune.models.clip import CLIPImageTransform
from torchtune.models.llama4 import Llama4Transform, llama4_transform
from torchtune.models.llama4._processor import LlamaImages
from torchtune.models.mistral3._processor import PixtralImages
from torchtune.models.smolvlm._processor import TiledImages

TILED = {
    "256M": ({"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, 16, 4),
    "2.2B": ({"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}, 14, 3),
    "small": ({"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}}, 4, 2),
}


def tiled(name: str) -> TiledImages:
    config, patch, merge = TILED[name]
    tower = {"patch_size": patch, "image_size": config["max_image_size"]["longest_edge"]}
    return TiledImages.from_config(config, {"vision_config": tower, "scale_factor": merge})


def theirs_of(name: str) -> SmolVLMImageProcessorPil:
    return SmolVLMImageProcessorPil(**TILED[name][0], return_row_col_info=True)


class _Shaped:
    """An image that only has a shape, so that 10,000 sizes are a moment."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = (3, height, width)


@pytest.mark.parametrize("name", TILED)
def test_plan_of_tiles_is_that_of_transformers(name, monkeypatch):
    processor, theirs, sized = tiled(name), theirs_of(name), {}
    base = SmolVLMImageProcessorPil.__mro__[1]
    monkeypatch.setattr(base, "resize", lambda self, image, size, **_: _Shaped(size.height, size.width))
    for height, width in sizes(processor.tile, processor.tile**2, processor.longest**2):
        first = theirs.resize(_Shaped(height, width), SizeDict(longest_edge=processor.longest))
        image = theirs.resize_for_vision_encoder(first, processor.tile)
        plan = processor.plan((width, height))
        assert (plan.height, plan.width) == image.shape[1:], (height, width)
        sized[plan.height, plan.width] = len(plan.grids)
    assert len(sized) > 5


@pytest.mark.parametrize("size", [(37, 50), (16, 16), (9, 200), (300, 20)])
def test_patches_and_text_of_tiles_are_those_of_transformers(size):
    image, processor = picture(*size), tiled("small")
    wanted = theirs_of("small")([image], return_tensors="np")
    plan = processor.plan(size)
    assert len(wanted["pixel_values"][0]) == len(plan.grids)
    found = squares(patches_by(processor, image), 4).numpy()
    assert np.abs(found - wanted["pixel_values"][0]).max() * 0.5 <= 2 / 255
    rows, columns = wanted["rows"][0][0], wanted["cols"][0][0]
    marks = ("<fake_token_around_image>", "<image>", "<global-img>")
    assert processor.layout(plan) == get_image_prompt_string(rows, columns, 4, *marks)


@pytest.mark.parametrize("longest", [1540, 64])
def test_plan_of_pixtral_is_that_of_transformers(longest):
    processor = PixtralImages.from_config({"patch_size": 14, "size": {"longest_edge": longest}}, {})
    refused = 0
    for height, width in sizes(28, 28 * 28, longest**2):
        wanted = get_resize_output_image_size(np.empty((3, height, width), np.uint8), longest, 28, "channels_first")
        if 0 in wanted:
            refused += 1
            with pytest.raises(DataError, match="no pixel left"):
                processor.plan((width, height))
            continue
        plan = processor.plan((width, height))
        assert (plan.height, plan.width) == wanted, (height, width)
        assert plan.tokens == wanted[0] * wanted[1] // 28**2
    assert longest > 64 or refused


@pytest.mark.parametrize("size", [(37, 50), (64, 64), (9, 200), (1, 1)])
def test_patches_of_pixtral_are_those_of_transformers(size):
    image = picture(*size)
    theirs = PixtralImageProcessorPil(patch_size={"height": 8, "width": 8}, size={"longest_edge": 64})
    wanted = theirs([image], return_tensors="np")["pixel_values"][0]
    processor = PixtralImages.from_config({"patch_size": 4, "size": {"longest_edge": 64}}, {"spatial_merge_size": 2})
    plan = processor.plan(size)
    found = pixels_of(patches_by(processor, image), *plan.grids[0][1:]).numpy()
    assert np.abs(found - wanted).max() * min(processor.std) <= 2 / 255
    rows, columns = plan.height // 8, plan.width // 8
    text = processor.layout(plan)
    assert text == ("[IMG]" * columns + "[IMG_BREAK]") * (rows - 1) + "[IMG]" * columns + "[IMG_END]"


LLAMA = {
    "published": ({"size": {"height": 336, "width": 336}, "max_patches": 16}, {"image_size": 336}),
    "small": ({"size": {"height": 16, "width": 16}, "max_patches": 4}, {"patch_size": 4, "image_size": 16}),
}


def llama(name: str) -> LlamaImages:
    config, tower = LLAMA[name]
    return LlamaImages.from_config(config, {"vision_config": tower})


@pytest.fixture
def import_rules(monkeypatch):
    """Import a module of ``transformers``, whose rules need torch alone, though it imports torchvision."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = SimpleNamespace(InterpolationMode=object)
    imported = []

    def import_(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        imported.append(name)
        return importlib.import_module(name)

    yield import_
    for name in imported:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", LLAMA)
def test_canvas_of_llama_is_that_of_transformers(name, import_rules):
    theirs_of_llama = import_rules("transformers.models.llama4.image_processing_llama4")
    processor, config = llama(name), LLAMA[name][0]
    size = SizeDict(**config["size"])
    canvases = torch.tensor(theirs_of_llama.find_supported_resolutions.__wrapped__(config["max_patches"], size))
    found, tile = set(), processor.tile
    for height, width in sizes(tile, tile**2, 16 * tile**2):
        wanted = theirs_of_llama.get_best_fit((height, width), canvases).tolist()
        plan = processor.plan((width, height))
        assert [plan.height, plan.width] == wanted, (height, width)
        found.add((plan.height, plan.width))
    assert len(found) == len(canvases)


@pytest.mark.parametrize("size", [(37, 50), (16, 16), (9, 200), (300, 20), (5, 7)])
def test_tiles_and_text_of_llama(size):
    image, processor = picture(*size), llama("small")
    half = [0.5] * 3
    tiles = CLIPImageTransform(tile_size=16, max_num_tiles=4, image_mean=half, image_std=half, dtype=torch.float32)
    wanted = tiles({"image": image})
    (rows, columns), plan = wanted["aspect_ratio"].tolist(), processor.plan(size)
    found = squares(patches_by(processor, image), 4)
    count = rows * columns
    assert len(found) == len(plan.grids) == count + (count > 1)
    assert (found[:count] - wanted["image"]).abs().max() * 0.5 <= 2 / 255
    if count > 1:
        whole = torch.from_numpy(np.array(image.resize((16, 16), Image.Resampling.BILINEAR))).permute(2, 0, 1)
        torch.testing.assert_close(found[-1], (whole / 255 - 0.5) / 0.5)
    text = Llama4Processor._prompt_split_image(None, (rows, columns), 4)
    assert processor.layout(plan) == text


def turn(role: str, body: str) -> str:
    return f"<|header_start|>{role}<|header_end|>\n\n{body}<|eot|>"


def test_rows_of_llama4_have_its_layout_and_its_patches(tmp_path):
    """Layout and ids of the reference: prompt_formats.md."""
    transform = Llama4Transform(
        write_ranks(tmp_path / "tokenizer.model"), tile_size=16, patch_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = llama("small")
    images = [picture(9, 60), picture(16, 16)]
    content = [{"type": "image", "content": image} for image in images]
    content.insert(1, {"type": "text", "content": " one "})
    messages = [Message("user", content), Message("assistant", "two three"), Message("user", "cat", masked=True)]
    row = transform({"messages": messages, "id": 3})
    first, second = (processor.layout(processor.plan(image.size)) for image in images)
    assert "<|tile_y_separator|>" in first
    assert second == "<|image_start|><|image|><|patch|><|patch|><|patch|><|patch|><|image_end|>"
    user, answer = turn("user", f"{first}one{second}"), turn("assistant", "two three")
    parts = ("<|begin_of_text|>", user, answer, turn("user", "cat"), "<|end_of_text|>")
    parse = transform.tt_model.tt_model.encode
    assert row["tokens"] == parse("".join(parts), allowed_special="all")
    assert [token for token, masked in zip(row["tokens"], row["mask"], strict=True) if not masked] == parse(
        turn("user", "one") + answer, allowed_special="all"
    )
    found = row["encoder_input"]["images"]
    assert found.grids == sum((processor.plan(image.size).grids for image in images), ())
    wanted = torch.from_numpy(np.concatenate([processor.pixels(image) for image in images]))
    torch.testing.assert_close(found.patches, (wanted / 255 - 0.5) / 0.5)
    assert found.places.tolist() == [i for i, token in enumerate(row["tokens"]) if token == 200_092]
    row["labels"] = [*row["tokens"][1:], -100]
    batch = collate_documents([{name: row[name] for name in ("tokens", "labels", "encoder_input")}])
    assert batch.inputs["encoder_input"]["images"].grids == found.grids
    opened = transform({"messages": messages[:2]}, inference=True)
    assert opened["tokens"] == parse("".join(parts[:3]).removesuffix("<|eot|>"), allowed_special="all")
    assert "encoder_input" not in transform({"messages": messages[1:]})
    assert (transform.vocab_size, transform.pad_id, transform.stop_tokens) == (
        202_048,
        200_018,
        [200_001, 200_008, 200_007],
    )
    ids = transform.special_tokens
    assert sorted(ids.values()) == list(range(200_000, 202_048))
    known = {"text_post_train_reserved_special_token_68": 200_079, "vision_reserved_special_token_1047": 201_133}
    known |= {"reasoning_thinking_end": 201_143, "reserved_special_token_0": 201_144, "tile_x_separator": 200_084}
    assert {name: ids[f"<|{name}|>"] for name in known} == known


def test_rows_of_llama4_are_never_cut_in_images(tmp_path):
    transform = llama4_transform(write_ranks(tmp_path / "tokenizer.model"), max_seq_len=100, max_num_tiles=1)
    messages = [Message("user", [{"type": "image", "content": picture(20, 20)}]), Message("assistant", "two")]
    with pytest.raises(DataError, match=r"max_seq_len=100 would cut .* tokens of images"):
        transform({"messages": messages})
    assert (transform.processor.tile, transform.processor.patch_size, transform.processor.most) == (336, 14, 1)
