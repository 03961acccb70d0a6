"""Cache of a frozen vision tower's features, with one file per image."""

import hashlib
import logging
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtune.data._images import is_url, open_image
from torchtune.data._messages import Video
from torchtune.utils import WriteError, atomic_write, convert_os_errors, get_logger, log_once

if TYPE_CHECKING:
    import torch


class CachedImage(NamedTuple):
    """Image of a batch, with its cached features or the file to cache them in.

    Attributes:
        path: file with the features.
        grids: frames, rows and columns of patches, for each part of the image.
        features: ``[rows, values]``; None if they are not cached yet. The batch then has the image's pixels.
        least_free: minimum number of bytes to leave free on the disk.
    """

    path: Path
    grids: tuple[tuple[int, int, int], ...]
    features: "torch.Tensor | None"
    least_free: int

    def write(self, features: "torch.Tensor") -> None:
        """Write the features to the file, unless fewer than ``least_free`` bytes are free."""
        from safetensors.torch import save

        problem = "half of the space is used that was free when the run started"
        if shutil.disk_usage(self.path.parent).free >= self.least_free:
            features = features.cpu().contiguous()
            try:
                with atomic_write(self.path) as file:
                    file.write(save({"features": features}, {"crc32": str(_checksum(features))}))
                return
            except WriteError as error:
                problem = error.fact
        log_once(get_logger(), f"image_cache: {problem}, no image is added.", logging.WARNING)


class ImageCache:
    """Folder of image features from one vision tower, by content of the image.

    The cache uses at most half of the disk space that is free when it is opened.

    Args:
        folder: folder of the files; created if missing.
        made_by: everything besides the image that the features depend on, such as the image processor.

    Raises:
        WriteError: the folder cannot be created.
    """

    def __init__(self, folder: Path, made_by: Any) -> None:
        with convert_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._least_free = shutil.disk_usage(folder).free // 2
        self._made_by = repr(made_by)

    def find(self, image: Any, grids: tuple[tuple[int, int, int], ...]) -> CachedImage:
        """Return the image with its cached features; they are None if the file is missing or damaged.

        Args:
            image: see :func:`open_image`.
            grids: frames, rows and columns of patches, for each part of the image.
        """
        from safetensors import SafetensorError, safe_open

        digest = hashlib.sha256(self._made_by.encode())
        for part in _content(image):
            digest.update(part)
        path, features = self.folder / f"{digest.hexdigest()}.safetensors", None
        try:
            with safe_open(path, framework="pt") as file:
                found, checksum = file.get_tensor("features"), file.metadata()["crc32"]
            features = found if checksum == str(_checksum(found)) else None
        except (OSError, SafetensorError, KeyError, TypeError):
            pass
        return CachedImage(path, grids, features, self._least_free)


def _content(image: Any) -> Iterator[bytes]:
    """Yield the bytes that identify an image: the contents of its file, or else its size and pixels."""
    if isinstance(image, Mapping):
        image = image["path"] if image.get("bytes") is None else image["bytes"]
    if isinstance(image, Video):
        for frame in image.frames:
            yield from _content(frame)
    elif isinstance(image, bytes | bytearray | memoryview):
        yield image
    elif isinstance(image, str | Path) and not is_url(image):
        yield Path(image).expanduser().read_bytes()
    else:
        pixels = open_image(image)
        yield repr(pixels.size).encode()
        yield pixels.tobytes()


def _checksum(features: "torch.Tensor") -> int:
    import torch

    return zlib.crc32(features.view(torch.uint8).numpy())
