"""Keys and files of cached image features."""

import base64
import random
import shutil

import pytest
import torch
from PIL import Image

from torchtune.data import ImageCache, Images, Video, grid_positions, join_images
from torchtune.utils import UserError

GRIDS = ((1, 2, 2),)
FEATURES = torch.arange(8, dtype=torch.bfloat16).view(2, 4)


def picture(path, seed=0):
    Image.frombytes("RGB", (5, 4), random.Random(seed).randbytes(60)).save(path)
    return path


def test_cache_key_covers_image_content_and_processor(tmp_path):
    first_image, same_image, other_image = (
        picture(tmp_path / f"{name}.png", seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    cache = ImageCache(tmp_path / "features", "a processor")
    url = f"data:image/png;base64,{base64.b64encode(first_image.read_bytes()).decode()}"
    same = [
        first_image,
        str(same_image),
        first_image.read_bytes(),
        {"bytes": first_image.read_bytes(), "path": None},
        {"path": str(same_image)},
    ]
    decoded = [url, Image.open(same_image)]
    different = [
        other_image,
        Image.open(other_image),
        Video((first_image, same_image), 2.0),
        Video((first_image, other_image), 2.0),
    ]
    paths = [cache.find(image, GRIDS).path for image in [*same, *decoded, *different]]
    assert len(set(paths[:5])) == len(set(paths[5:7])) == 1
    assert len(set(paths)) == 2 + len(different)
    assert ImageCache(tmp_path / "features", "another").find(first_image, GRIDS).path != paths[0]
    features = cache.find(first_image, GRIDS)
    assert features.features is None
    features.write(FEATURES)
    again = cache.find(same_image.read_bytes(), GRIDS)
    assert again.grids == GRIDS
    assert torch.equal(again.features, FEATURES)
    assert again.features.dtype == torch.bfloat16


@pytest.mark.parametrize("damage", [lambda data: data[:-1] + b"!", lambda data: data[:-3], lambda data: b""])
def test_a_damaged_file_counts_as_missing(damage, tmp_path):
    cache = ImageCache(tmp_path / "features", None)
    image = picture(tmp_path / "a.png")
    cache.find(image, GRIDS).write(FEATURES)
    path = cache.find(image, GRIDS).path
    path.write_bytes(damage(path.read_bytes()))
    assert cache.find(image, GRIDS).features is None


def test_half_of_the_free_space_is_left(tmp_path, caplog):
    features = ImageCache(tmp_path / "features", None).find(picture(tmp_path / "a.png"), GRIDS)
    assert 0 < features.least_free < 0.6 * shutil.disk_usage(tmp_path).free
    features._replace(least_free=2**62).write(FEATURES)
    assert not features.path.exists()
    assert "half of the space is used" in caplog.text


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        ImageCache(tmp_path / "file" / "features", None)


def test_documents_with_the_same_pixels_share_their_features():
    shared = torch.zeros(4, 3)
    other_pixels = torch.ones(8, 3)
    first = Images(shared, ((1, 2, 2),), places=torch.tensor([1]))
    second = Images(other_pixels, ((2, 2, 2),), places=torch.tensor([0, 2]))
    joined = join_images([first, None, second, first], [3, 2, 4, 3])
    assert joined.grids == ((1, 2, 2), (2, 2, 2))
    assert joined.pixels.equal(torch.cat([shared, other_pixels]))
    assert joined.places.tolist() == [1, 5, 7, 10]
    assert joined.features.tolist() == [0, 1, 2, 0]
    assert join_images([first, second], [3, 4]).features is None, "in order"


def test_positions_of_an_image_are_its_rows_and_columns_after_the_text():
    positions = grid_positions([9, 5, 5, 5, 5, 9], {5}, [(1, 4, 4)], merge=2)
    assert positions.tolist() == [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    positions = grid_positions([5, 9], {5}, [(1, 2, 2)], merge=2)
    assert positions.tolist() == [[0, 1]] * 3


def test_text_goes_on_behind_the_positions_of_an_image():
    positions = torch.from_numpy(grid_positions([9, 5, 5, 5, 5, 9], {5}, [(1, 4, 4)], merge=2))
    images = Images(torch.zeros(16, 3), ((1, 4, 4),), positions=positions[:, None])
    assert images.offset == -2, "the seventh token is at position 4"
    assert Images(torch.zeros(16, 3), ((1, 4, 4),)).offset == 0
