"""Image processors: sizes, patches and text are those of transformers."""

import importlib
import itertools
import random
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.tiny_images import PROCESSOR, patches_by, pixels_of, squares
from tests.torchtune.models.tokenizer_files import write_ranks
from torchtune.data import DataError, Message, Video, collate_documents
from torchtune.models.clip import CLIPImageTransform
from torchtune.models.gemma4_unified_vl import GemmaUnifiedImageProcessor
from torchtune.models.gemma4_vl import GemmaImageProcessor
from torchtune.models.llama4 import Llama4ImageProcessor, Llama4Transform, llama4_transform
from torchtune.models.mistral3 import PixtralImageProcessor
from torchtune.models.qwen3_vl import QwenImageProcessor
from torchtune.models.smolvlm import SmolVLMImageProcessor
from torchtune.modules.vision_transformer import patch_places

PROCESSORS = {
    "qwen3_vl": {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "qwen2_5_vl": {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 12_845_056}},
    "small": PROCESSOR,
}


def sizes(factor: int, least: int, most: int) -> list[tuple[int, int]]:
    """Random sizes, and those at limits: 1 x N, exact multiples and halves, areas and aspects at the limit."""
    rng = random.Random(0)
    cases = [(1, side) for side in range(1, 205)] + [(side, 1) for side in range(1, 205)]
    offsets = (-1, 0, 1)
    widths = (factor, 3 * factor // 2, 7 * factor)
    heights = (factor, 5 * factor // 2, 9 * factor)
    for width, offset, height in itertools.product(widths, offsets, heights):
        cases.append((width + offset, height))
    for area in (least, most):
        side = int(area**0.5)
        for width_offset, height_offset in itertools.product(offsets, offsets):
            cases.append((side + width_offset, side + height_offset))
    cases += [(7, 7 * 199), (7, 7 * 200), (7, 7 * 200 + 1), (7 * 201, 7)]
    while len(cases) < 10_000:
        cases.append((int(2 ** rng.uniform(0, 13.5)), int(2 ** rng.uniform(0, 13.5))))
    return cases


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BILINEAR)


def qwen(settings):
    processor = QwenImageProcessor.from_config(settings, {})
    side = 2 * processor.patch_size
    limits = settings["size"].values()
    return processor, side, limits, lambda height, width: smart_resize(height, width, side, *limits)


def pixtral(longest):
    processor = PixtralImageProcessor.from_config({"patch_size": 14, "size": {"longest_edge": longest}}, {})

    def resized(height, width):
        return get_resize_output_image_size(np.empty((3, height, width), np.uint8), longest, 28, "channels_first")

    return processor, 28, (28 * 28, longest**2), resized


def gemma(tokens):
    def resized(height, width):
        return get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)

    return GemmaImageProcessor.from_config({"max_soft_tokens": tokens}, {}), 48, (48 * 48, tokens * 48 * 48), resized


# name -> what makes a processor and the rule of transformers, and its setting
PLANS = {
    **{name: (qwen, settings) for name, settings in PROCESSORS.items()},
    **{f"pixtral {longest}": (pixtral, longest) for longest in (1540, 64)},
    **{f"gemma {tokens}": (gemma, tokens) for tokens in (70, 280, 1120)},
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_that_of_transformers(name):
    make, setting = PLANS[name]
    processor, side, limits, resized = make(setting)
    refused = 0
    for height, width in sizes(side, *limits):
        try:
            wanted = resized(height, width)
        except ValueError:
            wanted = (0, 0)
        if 0 in wanted:
            refused += 1
            with pytest.raises(DataError, match=r"too long|no pixel left"):
                processor.plan((width, height))
            continue
        plan = processor.plan((width, height))
        assert (plan.height, plan.width) == wanted, (height, width)
        assert plan.tokens == wanted[0] * wanted[1] // side**2
    assert bool(refused) == (make is not gemma)


@pytest.mark.parametrize("size", [(37, 50), (64, 64), (9, 200), (300, 20), (1, 1)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_patches_of_qwen_are_those_of_transformers(name, size):
    image = picture(*size)
    wanted = Qwen2VLImageProcessorPil(**{key: value for key, value in PROCESSORS[name].items() if "_type" not in key})(
        [image], return_tensors="np"
    )
    processor = QwenImageProcessor.from_config(PROCESSORS[name], {})
    assert [list(grid) for grid in processor.plan(size).grids] == wanted["image_grid_thw"].tolist()
    patches_found = patches_by(processor, image).numpy()
    assert patches_found.dtype == np.float32
    assert np.abs((patches_found - wanted["pixel_values"]) * min(processor.std)).max() <= 2 / 255


SETTINGS = {
    "do_resize": (False, "do_resize = False is not supported"),
    "resample": (1, "only bicubic"),
    "patch_size": (-4, "patch_size = -4"),
    "image_mean": (0.5, "image_mean = 0.5 is not three numbers"),
    "image_std": ([1.0, "1", 1.0], "image_std = .* is not three numbers"),
    "rescale_factor": ("1/255", "a factor of 1/255"),
    "size": (224, "size = 224 is not an object"),
}


@pytest.mark.parametrize("field", SETTINGS)
def test_settings_that_are_not_supported_are_refused(field):
    value, message = SETTINGS[field]
    with pytest.raises(DataError, match=message):
        QwenImageProcessor.from_config({**PROCESSOR, field: value}, {})


TILED = {
    "256M": ({"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}, 16, 4),
    "2.2B": ({"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}, 14, 3),
    "small": ({"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}}, 4, 2),
}


def tiled(name: str) -> SmolVLMImageProcessor:
    config, patch, merge = TILED[name]
    tower = {"patch_size": patch, "image_size": config["max_image_size"]["longest_edge"]}
    return SmolVLMImageProcessor.from_config(config, {"vision_config": tower, "scale_factor": merge})


def theirs_of(name: str) -> SmolVLMImageProcessorPil:
    return SmolVLMImageProcessorPil(**TILED[name][0], return_row_col_info=True)


class _Shaped:
    """An image that only has a shape, so that 10,000 sizes are a moment."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = (3, height, width)


@pytest.mark.parametrize("name", TILED)
def test_plan_of_tiles_is_that_of_transformers(name, monkeypatch):
    processor = tiled(name)
    hf_processor = theirs_of(name)
    sized = {}
    base = SmolVLMImageProcessorPil.__mro__[1]
    monkeypatch.setattr(base, "resize", lambda self, image, size, **_: _Shaped(size.height, size.width))
    for height, width in sizes(processor.tile, processor.tile**2, processor.longest**2):
        first = hf_processor.resize(_Shaped(height, width), SizeDict(longest_edge=processor.longest))
        image = hf_processor.resize_for_vision_encoder(first, processor.tile)
        plan = processor.plan((width, height))
        assert (plan.height, plan.width) == image.shape[1:], (height, width)
        sized[plan.height, plan.width] = len(plan.grids)
    assert len(sized) > 5


@pytest.mark.parametrize("size", [(37, 50), (16, 16), (9, 200), (300, 20)])
def test_patches_and_text_of_tiles_are_those_of_transformers(size):
    image = picture(*size)
    processor = tiled("small")
    wanted = theirs_of("small")([image], return_tensors="np")
    plan = processor.plan(size)
    assert len(wanted["pixel_values"][0]) == len(plan.grids)
    patches_found = squares(patches_by(processor, image), 4).numpy()
    assert np.abs(patches_found - wanted["pixel_values"][0]).max() * 0.5 <= 2 / 255
    rows = wanted["rows"][0][0]
    columns = wanted["cols"][0][0]
    marks = ("<fake_token_around_image>", "<image>", "<global-img>")
    assert processor.layout(plan) == get_image_prompt_string(rows, columns, 4, *marks)


@pytest.mark.parametrize("size", [(37, 50), (64, 64), (9, 200), (1, 1)])
def test_patches_of_pixtral_are_those_of_transformers(size):
    image = picture(*size)
    hf_processor = PixtralImageProcessorPil(patch_size={"height": 8, "width": 8}, size={"longest_edge": 64})
    wanted = hf_processor([image], return_tensors="np")["pixel_values"][0]
    processor = PixtralImageProcessor.from_config(
        {"patch_size": 4, "size": {"longest_edge": 64}}, {"spatial_merge_size": 2}
    )
    plan = processor.plan(size)
    patches_found = pixels_of(patches_by(processor, image), *plan.grids[0][1:]).numpy()
    assert np.abs(patches_found - wanted).max() * min(processor.std) <= 2 / 255
    rows = plan.height // 8
    columns = plan.width // 8
    text = processor.layout(plan)
    assert text == ("[IMG]" * columns + "[IMG_BREAK]") * (rows - 1) + "[IMG]" * columns + "[IMG_END]"


LLAMA = {
    "published": ({"size": {"height": 336, "width": 336}, "max_patches": 16}, {"image_size": 336}),
    "small": ({"size": {"height": 16, "width": 16}, "max_patches": 4}, {"patch_size": 4, "image_size": 16}),
}


def llama(name: str) -> Llama4ImageProcessor:
    config, tower = LLAMA[name]
    return Llama4ImageProcessor.from_config(config, {"vision_config": tower})


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
    processor = llama(name)
    config = LLAMA[name][0]
    size = SizeDict(**config["size"])
    canvases = torch.tensor(theirs_of_llama.find_supported_resolutions.__wrapped__(config["max_patches"], size))
    patches_found = set()
    tile = processor.tile
    for height, width in sizes(tile, tile**2, 16 * tile**2):
        wanted = theirs_of_llama.get_best_fit((height, width), canvases).tolist()
        plan = processor.plan((width, height))
        assert [plan.height, plan.width] == wanted, (height, width)
        patches_found.add((plan.height, plan.width))
    assert len(patches_found) == len(canvases)


@pytest.mark.parametrize("size", [(37, 50), (16, 16), (9, 200), (300, 20), (5, 7)])
def test_tiles_and_text_of_llama(size):
    image = picture(*size)
    processor = llama("small")
    half = [0.5] * 3
    tiles = CLIPImageTransform(tile_size=16, max_num_tiles=4, image_mean=half, image_std=half, dtype=torch.float32)
    wanted = tiles({"image": image})
    rows, columns = wanted["aspect_ratio"].tolist()
    plan = processor.plan(size)
    patches_found = squares(patches_by(processor, image), 4)
    count = rows * columns
    assert len(patches_found) == len(plan.grids) == count + (count > 1)
    assert (patches_found[:count] - wanted["image"]).abs().max() * 0.5 <= 2 / 255
    if count > 1:
        thumbnail = torch.from_numpy(np.array(image.resize((16, 16), Image.Resampling.BILINEAR))).permute(2, 0, 1)
        torch.testing.assert_close(patches_found[-1], (thumbnail / 255 - 0.5) / 0.5)
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
    patches_found = row["encoder_input"]["images"]
    assert patches_found.grids == sum((processor.plan(image.size).grids for image in images), ())
    wanted = torch.from_numpy(np.concatenate([processor.pixels(image) for image in images]))
    torch.testing.assert_close(patches_found.patches, (wanted / 255 - 0.5) / 0.5)
    assert patches_found.places.tolist() == [i for i, token in enumerate(row["tokens"]) if token == 200_092]
    row["labels"] = [*row["tokens"][1:], -100]
    batch = collate_documents([{name: row[name] for name in ("tokens", "labels", "encoder_input")}])
    assert batch.inputs["encoder_input"]["images"].grids == patches_found.grids
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
    named_ids = {"text_post_train_reserved_special_token_68": 200_079, "vision_reserved_special_token_1047": 201_133}
    named_ids |= {"reasoning_thinking_end": 201_143, "reserved_special_token_0": 201_144, "tile_x_separator": 200_084}
    assert {name: ids[f"<|{name}|>"] for name in named_ids} == named_ids


def test_rows_of_llama4_are_never_cut_in_images(tmp_path):
    transform = llama4_transform(write_ranks(tmp_path / "tokenizer.model"), max_seq_len=100, max_num_tiles=1)
    messages = [Message("user", [{"type": "image", "content": picture(20, 20)}]), Message("assistant", "two")]
    with pytest.raises(DataError, match=r"max_seq_len=100 would cut .* tokens of images"):
        transform({"messages": messages})
    assert (transform.processor.tile, transform.processor.patch_size, transform.processor.max_tiles) == (336, 14, 1)


SIZES = [(37, 50), (480, 960), (9, 200), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_frames_of_gemma_are_planned_as_images(size):
    settings = {"max_soft_tokens": 280}
    processor = GemmaImageProcessor.from_config({**settings, "video_processor": settings}, {})
    unified = GemmaUnifiedImageProcessor.from_config({"max_soft_tokens": 560, "video_processor": settings}, {})
    plan = processor.plan(size)
    for of_frames, side in ((processor, 16), (unified, 48)):
        frames = of_frames.plan((*size, 3, 2.0))
        assert (frames.height, frames.width, frames.tokens) == (plan.height, plan.width, 3 * plan.tokens)
        assert frames.grids == ((3, plan.height // side, plan.width // side),)


@pytest.mark.parametrize("size", SIZES)
def test_patches_of_gemma_are_those_of_transformers(size):
    images = [picture(*size, seed=seed) for seed in range(2)]
    wanted = Gemma4ImageProcessorPil(max_soft_tokens=70)(images, return_tensors="np")
    processor = GemmaImageProcessor.from_config({"max_soft_tokens": 70}, {})
    plan = processor.plan(size)
    patches_found = patches_by(processor, images[0]).numpy()
    assert plan.tokens == wanted["num_soft_tokens_per_image"][0]
    columns = plan.grids[0][2]
    row, column = patch_places(plan.grids, 3)[:2]
    hf_processor = wanted["pixel_values"][:, (row * columns + column).numpy()]
    assert np.abs((patches_found + 1) / 2 - hf_processor[0]).max() <= 2 / 255
    assert processor.layout(plan) == "<|image>" + "<|image|>" * plan.tokens + "<image|>"
    frames = patches_by(processor, Video(tuple(images), 1.0)).numpy()  # 70 tokens a frame, too
    assert np.abs((frames + 1) / 2 - np.concatenate(list(hf_processor))).max() <= 2 / 255


@pytest.mark.parametrize("size", SIZES)
def test_patches_of_a_token_are_merged_as_by_transformers(size, import_rules):
    rules = import_rules("transformers.models.gemma4_unified.image_processing_gemma4_unified")
    image = picture(*size)
    processor = GemmaUnifiedImageProcessor.from_config({"max_soft_tokens": 70}, {})
    plan = processor.plan(size)
    patches_found = patches_by(processor, image)
    small = Gemma4ImageProcessorPil(max_soft_tokens=70)([image], return_tensors="pt")
    patches, places = (small[name][:, : plan.tokens * 9] for name in ("pixel_values", "image_position_ids"))
    wanted, positions_found = rules.patches_merge(patches, places, plan.tokens)
    assert (patches_found - wanted[0]).abs().max() <= 2 / 255
    assert torch.equal(patch_places(plan.grids, 1)[:2].flip(0).T, positions_found[0])


def test_other_colors_of_gemma_are_refused():
    for config in (
        {"do_normalize": True, "image_mean": [0.5] * 3},
        {"video_processor": {"do_normalize": True, "image_std": [0.5] * 3}},
    ):
        with pytest.raises(DataError, match="do_normalize = True"):
            GemmaImageProcessor.from_config(config, {})
