"""Cache of the features of images that a frozen vision tower computes, in one file per image."""

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
    """An image of a batch.

    Attributes:
        path: file of its features.
        grids: frames, rows and columns of patches of its parts.
        features: ``[rows, values]``; None if they are not cached yet, so that its pixels are in the batch.
        least_free: bytes of the disk that are left free.
    """

    path: Path
    grids: tuple[tuple[int, int, int], ...]
    features: "torch.Tensor | None"
    least_free: int

    def write(self, features: "torch.Tensor") -> None:
        """Write the file, unless little of the disk is free."""
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
    """Folder of features by the content of an image, for one tower. It takes at most half of the free space.

    Args:
        folder: folder of the files; it is created.
        made_by: everything else that the features depend on, such as the image processor.

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
        """Return an image with its features, if they are cached; for ``image`` see :func:`open_image`.

        A damaged file counts as missing.
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
    """Yield the bytes of an image: of its file, or its pixels."""
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
