"""Validation of a GGUF header: all lengths must fit the size of the file.

The ``gguf`` package creates Python objects for the announced counts; a header that announces 2^40 would exhaust time
and memory. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from pathlib import Path

from torchtune.checkpoints._checkpoint_error import CheckpointError

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type of a value -> bytes
_MOST_ENTRIES = 2**20  # of metadata, and of tensors
_MOST_ELEMENTS = 2**23  # in all arrays: the largest vocabularies have about a million tokens and merges
_MOST_DIMENSIONS, _MOST_SIZE = 8, 2**40


class _Walk:
    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at, self.elements, self.order = content, 4, 0, "<"

    def number(self, code: str) -> int:
        value = struct.unpack_from(self.order + code, self.content, self.at)[0]
        self.at += struct.calcsize(code)
        return value

    def skip(self, size: int, what: str) -> None:
        self.at += size
        if self.at > len(self.content):
            raise ValueError(f"{what} of {size:,} bytes ends behind the file")

    def count(self, what: str, most: int) -> int:
        value = self.number("Q")
        if value > most:
            raise ValueError(f"it announces {value:,} {what}")
        return value

    def string(self) -> None:
        self.skip(self.number("Q"), "a text")

    def value(self, kind: int, depth: int = 0) -> None:
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY and depth < 2:
            kind, length = self.number("I"), self.count("elements of an array", _MOST_ELEMENTS - self.elements)
            self.elements += length
            if kind in _SIZES:
                self.skip(length * _SIZES[kind], "an array")
            else:
                for _ in range(length):
                    self.value(kind, depth + 1)
        elif kind in _SIZES:
            self.skip(_SIZES[kind], "a value")
        else:
            raise ValueError(f"a value is of an unknown kind ({kind})")

    def tensor(self) -> None:
        self.string()
        dimensions = self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions:,} dimensions")
        sizes = [self.number("Q") for _ in range(dimensions)]
        self.number("I")  # quantization type
        offset = self.number("Q")
        if offset > len(self.content) or math.prod(sizes) > _MOST_SIZE:
            raise ValueError(f"a tensor of shape {sizes} at {offset:,} ends behind the file")


def check_gguf(path: Path) -> None:
    """Check the counts and lengths in a GGUF file's header against the size of the file.

    Raises:
        CheckpointError: the file is too small for its header, or the header exceeds the limits of real models.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content[:4] != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            walk = _Walk(content)
            if not walk.number("I") & 0xFFFF:  # the other byte order
                walk.order = ">"
            tensors, entries = walk.count("tensors", _MOST_ENTRIES), walk.count("metadata", _MOST_ENTRIES)
            for _ in range(entries):
                walk.string()
                walk.value(walk.number("I"))
            for _ in range(tensors):
                walk.tensor()
    except (ValueError, struct.error, OSError) as error:
        reason = "it ends too early" if isinstance(error, struct.error) else error
        raise CheckpointError(f"{path} is not a whole GGUF file ({reason}): download it again.") from error
