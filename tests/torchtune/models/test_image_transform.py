"""Image processors and the transform of models with image tokens."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

import torchtune
from tests.tiny_images import (
    END,
    IMAGE,
    PROCESSOR,
    START,
    image_text_model,
    patches_by,
    qwen3_vl_config,
    write_image_checkpoint,
)
from torchtune.data import DataError, collate_documents, image_size, open_image
from torchtune.models import image_text_transform
from torchtune.models.qwen3_vl._processor import QwenImages

PROCESSORS = {
    "qwen3_vl": {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "qwen2_5_vl": {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 12_845_056}},
    "small": PROCESSOR,
}


def sizes(factor: int, least: int, most: int) -> list[tuple[int, int]]:
    """Random sizes, and those at limits: 1 x N, exact multiples and halves, areas and aspects at the limit."""
    rng = random.Random(0)
    found = [(1, side) for side in range(1, 205)] + [(side, 1) for side in range(1, 205)]
    found += [
        (side + off, other)
        for side in (factor, 3 * factor // 2, 7 * factor)
        for off in (-1, 0, 1)
        for other in (factor, 5 * factor // 2, 9 * factor)
    ]
    for area in (least, most):
        side = int(area**0.5)
        found += [(side + a, side + b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
    found += [(7, 7 * 199), (7, 7 * 200), (7, 7 * 200 + 1), (7 * 201, 7)]
    while len(found) < 10_000:
        found.append((int(2 ** rng.uniform(0, 13.5)), int(2 ** rng.uniform(0, 13.5))))
    return found


@pytest.mark.parametrize("name", PROCESSORS)
def test_plan_is_that_of_transformers(name):
    processor = QwenImages.from_config(PROCESSORS[name], {})
    factor, (least, most) = 2 * processor.patch_size, PROCESSORS[name]["size"].values()
    refused = 0
    for height, width in sizes(factor, least, most):
        try:
            wanted = smart_resize(height, width, factor, least, most)
        except ValueError:
            refused += 1
            with pytest.raises(DataError, match="too long"):
                processor.plan((width, height))
            continue
        plan = processor.plan((width, height))
        assert (plan.height, plan.width) == wanted, (height, width)
        assert plan.tokens == wanted[0] * wanted[1] // factor**2
        assert plan.grids == ((1, wanted[0] // processor.patch_size, wanted[1] // processor.patch_size),)
    assert refused > 5


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BILINEAR)


@pytest.mark.parametrize("size", [(37, 50), (64, 64), (9, 200), (300, 20), (1, 1)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_patches_are_those_of_transformers(name, size):
    image = picture(*size)
    wanted = Qwen2VLImageProcessorPil(**{key: value for key, value in PROCESSORS[name].items() if "_type" not in key})(
        [image], return_tensors="np"
    )
    processor = QwenImages.from_config(PROCESSORS[name], {})
    assert [list(grid) for grid in processor.plan(size).grids] == wanted["image_grid_thw"].tolist()
    found = patches_by(processor, image).numpy()
    assert found.dtype == np.float32
    assert np.abs((found - wanted["pixel_values"]) * min(processor.std)).max() <= 2 / 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_image_checkpoint(image_text_model(qwen3_vl_config()), tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def transform(folder):
    return image_text_transform(str(folder))


def turns(*images, answer="so"):
    content = [
        part for image in images for part in ({"type": "text", "content": "See "}, {"type": "image", "content": image})
    ]
    user = torchtune.data.Message(role="user", content=[*content, {"type": "text", "content": " Why?"}], masked=True)
    return {"messages": [user, torchtune.data.Message(role="assistant", content=answer)]}


def test_tokens_are_those_of_transformers(folder, transform):
    images = [picture(40, 20), picture(16, 16)]
    row = transform(turns(*images))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = [{"type": "text", "text": "See "}, {"type": "image"}] * 2 + [{"type": "text", "text": " Why?"}]
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "so"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    counts = [transform.processor.plan(image.size).tokens for image in images]
    for count in counts:
        text = text.replace("<|image_pad|>", "<|here|>" * count, 1)
    wanted = tokenizer(text.replace("<|here|>", "<|image_pad|>"), add_special_tokens=False)["input_ids"]
    assert row["tokens"] == wanted
    assert row["tokens"].count(IMAGE) == sum(counts) > 8
    assert all(masked for token, masked in zip(row["tokens"], row["mask"], strict=True) if token in (IMAGE, START, END))
    trained = [token for token, masked in zip(row["tokens"], row["mask"], strict=True) if not masked]
    assert transform.decode(trained, skip_special_tokens=False) == "so<|im_end|>"
    assert row["encoder_input"]["images"].places.tolist() == [i for i, token in enumerate(wanted) if token == IMAGE]


def test_collated_rows_are_the_rows(folder, transform):
    """Logits of a batch of documents with and without images are those of each row alone."""
    model, _ = torchtune.load(folder, device="cpu")
    rows = [transform(turns(picture(40, 20))), transform(turns()), transform(turns(picture(16, 30, 1), picture(9, 9)))]
    for row in rows:
        row["labels"] = [-100] * len(row["tokens"])
        del row["mask"]
    batch = collate_documents(rows)
    with torch.no_grad():
        together = model(**batch.model_inputs())
        alone = [model(torch.tensor([row["tokens"]]), encoder_input=row.get("encoder_input")) for row in rows]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)
    assert collate_documents([rows[1]]).inputs == {}


def test_a_row_that_would_be_cut_inside_an_image_is_refused(folder):
    short = image_text_transform(str(folder), max_seq_len=12)
    with pytest.raises(DataError, match=r"max_seq_len=12 would cut .* tokens of images off a row of"):
        short(turns(picture(40, 20)))
    row = image_text_transform(str(folder), max_seq_len=30)(turns(picture(8, 8), answer="so " * 30))
    assert len(row["tokens"]) == 30  # text is cut


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_sizes_from_headers_are_those_of_decoded_images(kind, orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned"
    picture(40, 20).save(path, kind, exif=exif)
    assert image_size(str(path)) == open_image(str(path)).size == ((40, 20) if orientation < 5 else (20, 40))


def test_images_of_the_assistant_are_refused(transform):
    said = [{"type": "image", "content": picture(8, 8)}]
    messages = [torchtune.data.Message(role="user", content="Draw."), torchtune.data.Message("assistant", said)]
    with pytest.raises(DataError, match="a turn of the assistant holds an image"):
        transform({"messages": messages})


def test_text_that_spells_a_placeholder_is_text(transform):
    row = transform({"messages": [*turns(picture(8, 8), answer="<|image_pad|>")["messages"]]})
    assert row["tokens"].count(IMAGE) == transform.processor.plan((8, 8)).tokens


SETTINGS = {
    "do_resize": (False, "do_resize = False, which is not supported"),
    "resample": (1, "only bicubic"),
    "patch_size": (-4, "patch_size is -4"),
}


@pytest.mark.parametrize("field", SETTINGS)
def test_settings_that_are_not_supported_are_refused(field):
    value, message = SETTINGS[field]
    with pytest.raises(DataError, match=message):
        QwenImages.from_config({**PROCESSOR, field: value}, {})
