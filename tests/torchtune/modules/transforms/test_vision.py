"""Images to tiles, against transformers' processor of the same model (Pillow backend) and formulas."""

import base64
import io
import os
import random
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.mllama.image_processing_pil_mllama import (
    MllamaImageProcessorPil,
    get_all_supported_aspect_ratios,
    get_image_size_fit_to_canvas,
    get_optimal_tiled_canvas,
)

from torchtune.data import DataError, check_image, load_image, open_image, read_pixels
from torchtune.models.clip import CLIP_MEAN, CLIP_STD, CLIPImageTransform, clip_vit_224_transform
from torchtune.modules.transforms import VisionCrossAttentionMask
from torchtune.modules.transforms.vision import (
    find_supported_resolutions,
    get_canvas_best_fit,
    get_inscribed_size,
    tile_crop,
)

TILE = 28
ON_HOST = True  # images are processed there


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_canvas_and_size_are_those_of_transformers():
    rng = random.Random(0)
    canvases = find_supported_resolutions(4, TILE)
    assert {(h // TILE, w // TILE) for h, w in canvases} == set(get_all_supported_aspect_ratios(4))
    sizes = [(rng.randint(1, 200), rng.randint(1, 200)) for _ in range(200)]
    for height, width in [*sizes, (TILE, TILE), (56, 28), (28, 112), (112, 112), (1, 1000)]:
        image = torch.empty(3, height, width)
        canvas = get_canvas_best_fit(image, torch.tensor(canvases), resize_to_max_canvas=False)
        assert canvas == get_optimal_tiled_canvas(height, width, 4, TILE)
        inscribed = get_inscribed_size((height, width), canvas, max_size=TILE)
        assert inscribed == get_image_size_fit_to_canvas(height, width, *canvas, TILE)
    # Enlarged as much as possible: 2 x 2 tiles let a square grow twofold.
    assert get_canvas_best_fit(torch.empty(3, 28, 28), torch.tensor(canvases), resize_to_max_canvas=True) == (56, 56)


def processed(image: Image.Image) -> tuple[torch.Tensor, list[int]]:
    processor = MllamaImageProcessorPil(
        size={"height": TILE, "width": TILE}, max_image_tiles=4, image_mean=CLIP_MEAN, image_std=CLIP_STD
    )
    out = processor(images=[[image]], return_tensors="pt")
    pixels = out["pixel_values"][0, 0, : int(out["num_tiles"][0][0])]
    return pixels, list(get_all_supported_aspect_ratios(4)[int(out["aspect_ratio_ids"][0, 0]) - 1])


@pytest.mark.parametrize(
    ("size", "levels"), [((28, 56), 0), ((56, 56), 0), ((50, 20), 0), ((300, 70), 1), ((9, 31), 1)]
)
def test_pixels_are_those_of_transformers(size, levels):
    """Exact where nothing is resized; else one of 255 levels apart, as Pillow's fixed point rounds otherwise."""
    image = photo(*size)
    transform = CLIPImageTransform(image_mean=CLIP_MEAN, image_std=CLIP_STD, tile_size=TILE, dtype=torch.float32)
    tiles = transform({"image": image})
    hf_tiles, ratio = processed(image)
    assert tiles["aspect_ratio"].tolist() == ratio
    torch.testing.assert_close(tiles["image"], hf_tiles, rtol=0, atol=levels / 255 / min(CLIP_STD) + 1e-5)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(transform({"image": pixels})["image"], tiles["image"])
    in_floats = transform({"image": pixels / 255})["image"]
    torch.testing.assert_close(in_floats, tiles["image"], rtol=0, atol=levels / 255 / min(CLIP_STD) + 1e-5)


def test_one_tile_of_clip_is_filled():
    row = clip_vit_224_transform()({"image": torch.full((1, 10, 5), 255, dtype=torch.uint8), "row": 7})
    assert (row["image"].shape, row["image"].dtype, row["row"]) == ((1, 3, 224, 224), torch.bfloat16, 7)
    white, black = ((torch.tensor([v] * 3) - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD) for v in (1.0, 0.0))
    torch.testing.assert_close(row["image"][0, :, 223, 111].float(), white, rtol=0, atol=0.01)
    torch.testing.assert_close(row["image"][0, :, 0, 112].float(), black, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("settings", "image", "message"),
    [
        ({"resample": "lanczos"}, None, "resample must be one of .*, not 'lanczos'"),
        ({"image_mean": CLIP_MEAN}, None, "image_mean and image_std belong together"),
        ({"image_mean": [0.5], "image_std": [0.5]}, None, "image_mean needs 3 values"),
        ({"max_num_tiles": None}, None, "needs possible_resolutions or max_num_tiles"),
        ({"tile_size": 5, "possible_resolutions": [(5, 7)]}, torch.zeros(3, 5, 7), "5 x 7 .* is not of whole tiles"),
        ({}, torch.zeros(4, 2, 2), r"of 1 or 3 channels, not \(4, 2, 2\)"),
        ({}, torch.zeros(3, 2, 2, dtype=torch.int64), "uint8 or floating point, not torch.int64"),
    ],
)
def test_settings_and_images_that_do_not_fit_are_refused(settings, image, message):
    with pytest.raises(DataError, match=message):
        CLIPImageTransform(**settings)({"image": image})


def test_tiles_and_patches_that_do_not_divide_are_refused():
    with pytest.raises(DataError, match="6 x 8 cannot be cut into tiles of 4"):
        tile_crop(torch.zeros(1, 6, 8), 4)
    with pytest.raises(DataError, match="patch_size=13 does not divide tile_size=28"):
        VisionCrossAttentionMask(28, 13, 9)


def test_image_tokens_without_an_image_are_refused():
    mask = VisionCrossAttentionMask(28, 14, 9)
    with pytest.raises(DataError, match="has 1 tokens of images, but there are 0 images"):
        mask({"tokens": [9], "encoder_input": {"images": []}})


def test_images_are_read_upright_and_on_white(tmp_path):
    image = photo(2, 3)
    image.save(tmp_path / "a.png")
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(load_image(tmp_path / "a.png"), expected)
    encoded = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    assert torch.equal(load_image(f"data:image/png;base64,{encoded}"), expected)
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    clear.save(tmp_path / "clear.png")
    assert load_image(tmp_path / "clear.png")[:, 0].T.tolist() == [[255] * 3, [10, 20, 30]]
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image.save(tmp_path / "turned.png", exif=exif)
    path = tmp_path / "turned.png"
    for turned in (path, Image.open(path), path.read_bytes()):
        assert torch.equal(read_pixels(turned), expected.rot90(-1, (1, 2)))
    deep = Image.fromarray(np.array([[0, 128, 257 * 100, 0xFFFF]], dtype=np.uint16))
    assert read_pixels(deep)[0].tolist() == [[0, 0, 100, 255]]


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    file = io.BytesIO()
    photo(40, 40).save(file, "PNG")
    (tmp_path / "half.png").write_bytes(file.getvalue()[:2000])
    (tmp_path / "text.png").write_text("no image")
    for name, reason in {
        "half.png": "truncated", "text.png": "of no kind that is read", "none.png": "there is no such file",
    }.items():  # fmt: skip
        with pytest.raises(DataError, match=f"the image .*{name} cannot be read .*{reason}"):
            load_image(tmp_path / name)
    with pytest.raises(DataError, match=r"the image cannot be read .its base64 is broken"):
        load_image("data:image/png;base64,***")
    for address in ("http://127.0.0.1:1/a.png", "https://127.0.0.1:1/a.png"):
        for value, decode in product((address, {"path": address}), (False, True)):
            with pytest.raises(DataError, match=f"the image {address} is an address of the web, .*: download it"):
                check_image(value, decode)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.png", tmp_path / "link.png", "/dev/zero", tmp_path):
        for value, decode in product((path, str(path), {"path": str(path)}), (False, True)):
            with pytest.raises(DataError, match=f"the image {path} cannot be read .it is not a regular file"):
                check_image(value, decode)
    for value in ({"bytes": "zzz"}, {"bytes": [1, 2]}, {"bytes": 3, "path": "a.png"}):
        with pytest.raises(DataError, match=r"must be the bytes of its file, not (str|list|int)"):
            open_image(value)
    with pytest.raises(DataError, match="an image must be a path, its bytes or a Pillow image, not int"):
        open_image({"path": 3})
    with pytest.raises(DataError, match="are floating-point numbers: save it with 8 or 16 bits"):
        read_pixels(Image.new("F", (2, 2), 0.5))
    with pytest.raises(DataError, match="must be from 0 to 1, not 0 to 255"):
        CLIPImageTransform()({"image": torch.tensor([0.0, 255.0]).expand(3, 1, 2)})
    with pytest.raises(DataError, match="not int"):
        CLIPImageTransform()({"image": 3})


def test_a_format_that_another_program_reads_is_not_opened(tmp_path, monkeypatch):
    """EPS is a program, which Pillow gives to Ghostscript."""
    Image.new("RGB", (4, 4)).save(tmp_path / "a.eps")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(DataError, match="of no kind that is read"):
        open_image(tmp_path / "a.eps")
    assert not (tmp_path / "ran").exists()
