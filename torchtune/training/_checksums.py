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
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):  # other attributes, such as the device mesh
                yield from checksum_bits(inner)
        return
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    yield data[:whole].view(torch.int64).sum()
    yield data[whole:].sum()


@torch.no_grad()
def checksum_trained(model: nn.Module) -> list[int]:
    """Return sums of the bits of this rank's shards of all trained parameters; none in a simulation."""
    if is_simulated():
        return []
    sums = [one for parameter in model.parameters() if parameter.requires_grad for one in checksum_bits(parameter)]
    return torch.stack([one.cpu() for one in sums]).tolist() if sums else []


@torch.no_grad()
def fingerprint_weights(parameters: Sequence[tuple[str, nn.Parameter]], dims: ParallelDims) -> tuple[str, int]:
    """Return a fingerprint of names, dtypes and bits of (name, parameter) pairs. A collective."""
    names = repr([(name, value.dtype) for name, value in parameters])
    sums = (sum(map(int, checksum_bits(value))) for _, value in parameters)
    total = sum((place + 1) * value for place, value in enumerate(sums)) % 2**40  # float64 sums are exact below this
    return hashlib.sha256(names.encode()).hexdigest(), dims.exchange([total])[0][0]
