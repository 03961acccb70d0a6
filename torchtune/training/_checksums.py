"""Checksums of weights."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from torchtune.training.parallel import ParallelDims
from torchtune.utils import is_simulated


def checksum_bits(tensor: Tensor) -> Iterator[Tensor]:
    """Yield sums, modulo 2**64, of the bits of this rank's shard of a tensor."""
    if hasattr(tensor, "__tensor_flatten__"):  # sharded or quantized
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # other attributes, such as the device mesh, have no bits
                yield from checksum_bits(inner)
        return
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)  # [bytes]
    if data.storage_offset() % 8:  # a view as int64 must begin at a multiple of 8 bytes
        data = data.clone()
    # Words of 8 bytes are summed many times faster than bytes; the last bytes may be less than a word.
    end_of_words = data.numel() // 8 * 8
    yield data[:end_of_words].view(torch.int64).sum()
    yield data[end_of_words:].sum()


@torch.no_grad()
def checksum_trained(model: nn.Module) -> list[int]:
    """Return sums of the bits of this rank's shards of all trained parameters; none in a simulation."""
    if is_simulated():
        return []
    sums: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            sums += checksum_bits(parameter)
    if not sums:
        return []
    return torch.stack([total.cpu() for total in sums]).tolist()


@torch.no_grad()
def fingerprint_weights(parameters: Sequence[tuple[str, nn.Parameter]], dims: ParallelDims) -> tuple[str, int]:
    """Return a fingerprint of names, dtypes and bits of (name, parameter) pairs. A collective."""
    names = repr([(name, parameter.dtype) for name, parameter in parameters])
    total = 0
    # The factor tells two parameters apart whose values were exchanged.
    for factor, (_, parameter) in enumerate(parameters, start=1):
        total += factor * sum(map(int, checksum_bits(parameter)))
    (total_of_ranks,) = dims.sum(total % 2**40)  # below 2**40, the float64 sum over the ranks is exact
    return hashlib.sha256(names.encode()).hexdigest(), total_of_ranks
