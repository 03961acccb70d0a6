"""Packs of rows with images."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import torchtune
from tests.tiny import write_lines
from tests.tiny_images import IMAGE, image_text_model, qwen3_vl_config, write_image_checkpoint
from torchtune.data import DataError, collate_documents
from torchtune.datasets import PackedDataset
from torchtune.datasets._packed import best_fit, spread_images
from torchtune.datasets.multimodal import multimodal_chat_dataset, vqa_dataset
from torchtune.models import image_text_transform

SIZES = [(40, 20), (64, 64), (9, 200), (30, 50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("packs")
    write_image_checkpoint(image_text_model(qwen3_vl_config()), path)
    rng = np.random.default_rng(0)
    rows = [{"input": "Is it?", "output": "no " * (i + 1), "image": None} for i in range(8)]
    for i, (width, height) in enumerate(SIZES * 3):
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{i}.png")
        rows.append({"input": "What?", "output": "so", "image": f"{i}.png"})
    write_lines(path / "rows.jsonl", rows)
    return path


def packs(folder, max_seq_len=120, source="rows.jsonl", **settings):
    transform = image_text_transform(str(folder), max_seq_len=max_seq_len)
    arguments = {"packed": True, "image_dir": str(folder), **settings}
    return vqa_dataset(transform, source=str(folder / source), **arguments)


def test_packs_have_every_row_once_with_its_image(folder):
    packed = packs(folder)
    assert len(packed) < len(packed.ds) == 8 + 12
    rows = []
    for i in range(len(packed)):
        rows += [origin["row"] for origin in packed.origins(i)]
    assert sorted(rows) == list(range(20))
    for i in range(len(packed)):
        documents = packed[i]
        assert sum(len(document["tokens"]) for document in documents) == packed.lengths[i] <= 120
        for document in documents:
            tokens = np.array(document["tokens"])
            assert ("encoder_input" in document) == (tokens == IMAGE).any()


def test_a_batch_of_packs_has_loss_and_gradients_of_its_rows_alone(folder):
    model, _ = torchtune.load(folder, device="cpu")
    model.requires_grad_(True)
    packed = packs(folder)

    def gradients(batches):
        model.zero_grad()
        total = 0.0
        for batch in batches:
            logits = model(**batch.model_inputs())
            value = torch.nn.functional.cross_entropy(logits[0], batch.labels[0], ignore_index=-100, reduction="sum")
            value.backward()
            total += value.item()
        return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    chosen = [packed[0], packed[1], packed[2]]
    documents = [*packed[0], *packed[1], *packed[2]]
    assert any("encoder_input" not in document for document in documents)
    together, packed_gradients = gradients([collate_documents(chosen)])
    alone, row_gradients = gradients([collate_documents([document]) for document in documents])
    assert together == pytest.approx(alone, rel=1e-5)
    for name in packed_gradients:
        scale = row_gradients[name].abs().max().clamp(min=1e-3)
        torch.testing.assert_close(packed_gradients[name] / scale, row_gradients[name] / scale, atol=1e-4, rtol=1e-3)


def test_images_are_spread_evenly():
    rng = np.random.default_rng(0)
    images = np.where(rng.random(500) < 0.4, rng.integers(64, 1200, 500), 0)
    lengths = images + rng.integers(10, 800, 500)
    even, plain = (best_fit(lengths, 4096, counts) for counts in (images, None))
    assert sorted(np.concatenate(even)) == list(range(500))
    assert max(lengths[pack].sum() for pack in even) <= 4096
    assert len(even) <= 1.02 * len(plain)
    most = max(images[pack].sum() for pack in even)
    plain_most = max(images[pack].sum() for pack in plain)
    mean = images.sum() / len(even)
    assert most < 1.2 * mean < 1.5 * mean < plain_most


def test_no_image_is_decoded_before_training(folder):
    image_bytes = (folder / "3.png").read_bytes()
    try:
        (folder / "3.png").write_bytes(image_bytes[:60] + image_bytes[-64:])  # header and end, without pixels
        (folder / "other.jsonl").write_text((folder / "rows.jsonl").read_text().replace("no", "yes"))
        packed = packs(folder, source="other.jsonl")
        numbers = {}  # of the pack with each row
        for i in range(len(packed)):
            for origin in packed.origins(i):
                numbers[origin["row"]] = i
        with pytest.raises(DataError, match=r"row 11 .*3.png cannot be read"):
            packed[numbers[11]]
    finally:
        (folder / "3.png").write_bytes(image_bytes)


def test_rows_are_refused_or_left_out_in_the_place_of_being_cut(folder):
    with pytest.raises(DataError, match=r"rows 9, 13, 17: max_seq_len=60 would cut \d+ tokens of images"):
        packs(folder, max_seq_len=60)
    packed = packs(folder, max_seq_len=60, on_bad_row="skip")
    assert len(packed.ds) == 17
    with pytest.raises(DataError, match="split_across_pack would cut rows inside their images"):
        PackedDataset(packed.ds, max_seq_len=60, split_across_pack=True)


def saved(kind="PNG", size=(40, 20), mode="RGB", keep=1.0, frames=1, **settings):
    """The bytes of a file of random pixels, of which the share ``keep`` has arrived."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    file = io.BytesIO()
    if frames > 1:
        settings |= {"save_all": True, "append_images": [Image.new("RGB", size)] * (frames - 1)}
    Image.fromarray(pixels).convert(mode).save(file, kind, **settings)
    return file.getvalue()[: int(len(file.getvalue()) * keep)]


def claimed(width, height):
    """A PNG whose header claims a size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = saved()
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved("JPEG", exif=exif)


TOO_LONG = "pixels is too long: its sides may differ by 200 times"
# Name -> file, and its grid or the reason why it is refused.
FILES = {
    "cmyk.jpg": (saved("JPEG", mode="CMYK"), (1, 4, 10)),
    "deep.png": (saved(mode="I;16"), (1, 4, 10)),
    "turned.jpg": (turned(), (1, 10, 4)),
    "dot.png": (saved(size=(1, 1)), (1, 4, 4)),
    "photograph.jpg": (saved("MPO", frames=2), (1, 4, 10)),
    "wide.png": (saved(size=(50_000, 1)), f"an image of 50000 x 1 {TOO_LONG}"),
    "tall.png": (saved(size=(1, 50_000)), f"an image of 1 x 50000 {TOO_LONG}"),
    "cut.png": (saved(keep=0.7), "image file is truncated"),
    "cut.jpg": (saved("JPEG", keep=0.7), "image file is truncated"),
    "moving.gif": (saved("GIF", frames=2), "it has several frames or pages: save each that you need as a PNG"),
    "moving.webp": (saved("WEBP", frames=2), "it has several frames or pages"),
    "pages.tiff": (saved("TIFF", frames=2), "it has several frames or pages"),
    "numbers.tiff": (saved("TIFF", mode="F"), "its pixels are floating-point numbers: save it with 8 or 16 bits"),
    "bomb.png": (claimed(60_000, 60_000), "it has more pixels than Pillow decodes: reduce it"),
    "empty.png": (b"", "it is of no kind that is read"),
    "none.png": (None, "there is no such file"),
    "https://there.org/a.png": (None, "is an address of the web, from which nothing is fetched: download it"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_an_image_is_read_or_named_before_training(name, packed, folder, tmp_path):
    content, wanted = FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.png").write_bytes(saved())
    turns = [{"from": "human", "value": "<image><image>?"}, {"from": "gpt", "value": "so"}]
    rows = [{"image": ["good.png", image], "conversations": turns} for image in ("good.png", name)]
    settings = {"source": rows, "image_dir": str(tmp_path), "image_tag": "<image>", "packed": packed}
    transform = image_text_transform(str(folder), max_seq_len=100)
    if isinstance(wanted, tuple):
        dataset = multimodal_chat_dataset(transform, **settings)
        documents = []
        for i in range(len(dataset)):
            documents += dataset[i] if packed else [dataset[i]]
        grids = [document["encoder_input"]["images"].grids[1] for document in documents]
        assert sorted(grids) == sorted([(1, 4, 10), wanted])
        return
    with pytest.raises(DataError, match=rf"row 1: image 2 of 2: .*{wanted}"):
        multimodal_chat_dataset(transform, **settings)
    assert len(multimodal_chat_dataset(transform, **{**settings, "packed": False}, on_bad_row="skip")) == 1


def test_rows_with_images_that_fill_a_pack_exactly_open_no_further_pack():
    assert spread_images(np.array([4, 4, 1, 3]), 4, np.array([2, 1, 2, 1])) == [[0], [2, 3], [1]]
