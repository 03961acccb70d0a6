"""Packs of rows with images."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import torchtune
from tests.tiny_images import IMAGE, image_text_model, qwen3_vl_config, write_image_checkpoint
from torchtune.data import DataError, collate_documents
from torchtune.datasets import PackedDataset
from torchtune.datasets._packed import best_fit
from torchtune.datasets.multimodal import vqa_dataset
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
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def packs(folder, max_seq_len=120, source="rows.jsonl", **settings):
    transform = image_text_transform(str(folder), max_seq_len=max_seq_len)
    given = {"packed": True, "image_dir": str(folder), **settings}
    return vqa_dataset(transform, source=str(folder / source), **given)


def test_packs_have_every_row_once_with_its_image(folder):
    found = packs(folder)
    assert len(found) < len(found.ds) == 8 + 12
    rows = sorted(origin["row"] for i in range(len(found)) for origin in found.origins(i))
    assert rows == list(range(20))
    for i in range(len(found)):
        documents = found[i]
        assert sum(len(document["tokens"]) for document in documents) == found.lengths[i] <= 120
        for document in documents:
            tokens = np.array(document["tokens"])
            assert ("encoder_input" in document) == (tokens == IMAGE).any()


def test_a_batch_of_packs_has_loss_and_gradients_of_its_rows_alone(folder):
    model, _ = torchtune.load(folder, device="cpu")
    model.requires_grad_(True)
    found = packs(folder)

    def gradients(batches):
        model.zero_grad()
        total = 0.0
        for batch in batches:
            logits = model(**batch.model_inputs())
            value = torch.nn.functional.cross_entropy(logits[0], batch.labels[0], ignore_index=-100, reduction="sum")
            value.backward()
            total += value.item()
        return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    chosen = [found[0], found[1], found[2]]
    assert any("encoder_input" not in document for pack in chosen for document in pack)
    together, one = gradients([collate_documents(chosen)])
    alone, other = gradients([collate_documents([document]) for pack in chosen for document in pack])
    assert together == pytest.approx(alone, rel=1e-5)
    for name in one:
        scale = other[name].abs().max().clamp(min=1e-3)
        torch.testing.assert_close(one[name] / scale, other[name] / scale, atol=1e-4, rtol=1e-3)


def test_images_are_spread_evenly():
    rng = np.random.default_rng(0)
    images = np.where(rng.random(500) < 0.4, rng.integers(64, 1200, 500), 0)
    lengths = images + rng.integers(10, 800, 500)
    even, plain = (best_fit(lengths, 4096, given) for given in (images, None))
    assert sorted(row for pack in even for row in pack) == list(range(500))
    assert max(lengths[pack].sum() for pack in even) <= 4096
    assert len(even) <= 1.02 * len(plain)
    most, plain_most = (max(images[pack].sum() for pack in found) for found in (even, plain))
    mean = images.sum() / len(even)
    assert most < 1.2 * mean < 1.5 * mean < plain_most


def test_no_image_is_decoded_before_training(folder):
    whole = (folder / "3.png").read_bytes()
    try:
        (folder / "3.png").write_bytes(whole[:60])  # the header, without pixels
        found = packs(folder)
        number = next(i for i in range(len(found)) if 11 in [origin["row"] for origin in found.origins(i)])
        with pytest.raises(DataError, match=r"row 11 .*3.png cannot be read"):
            found[number]
    finally:
        (folder / "3.png").write_bytes(whole)


def test_rows_are_refused_or_left_out_in_the_place_of_being_cut(folder):
    with pytest.raises(DataError, match=r"rows 9, 13, 17: max_seq_len=60 would cut \d+ tokens of images"):
        packs(folder, max_seq_len=60)
    found = packs(folder, max_seq_len=60, on_bad_row="skip")
    assert len(found.ds) == 17
    with pytest.raises(DataError, match="split_across_pack would cut rows inside their images"):
        PackedDataset(found.ds, max_seq_len=60, split_across_pack=True)
