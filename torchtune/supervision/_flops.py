"""FLOPs of a training step, and peak FLOPs of devices.

A matrix of n elements costs 2 n FLOPs per token in the forward pass (one multiplication and one addition per element),
2 n for the gradient of its input, and 2 n for its own gradient (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
The total is 6 n for a trained matrix, 4 n for a frozen matrix through which gradients flow (such as the base of LoRA),
and 2 n below the first trained layer. Attention costs 4 FLOPs per query channel and visible query-key pair (scores and
values), and 8 in the backward pass (Chowdhery et al. 2022, arXiv:2204.02311, appendix B; they count all pairs of a row,
this module only pairs within the causal mask, the document and the layer's window). Linear attention costs 6 FLOPs per
element of its state and token (read by the key, corrected, read by the query), and 12 in the backward pass. The output
projection counts only where the loss computes it: at labels.

Recomputation (activation checkpointing) does not count: these are FLOPs of the model, not of the hardware. Norms, RoPE,
activations, the softmax and the optimizer are omitted, as is usual.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

# Dense bf16 TFLOPS with float32 accumulation (without sparsity), from the vendors' data sheets, by words of the device
# name. The row with the most matching words applies.
_PEAKS = {
    "A10": 125.0,
    "A10G": 70.0,
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "A800": 312.0,
    "RTX A6000": 154.8,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
    "RTX 6000 Ada": 364.2,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H800": 989.4,
    "H800 PCIe": 756.0,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "GH200": 989.4,
    "B200": 2250.0,
    "GB200": 2500.0,
    "MI300X": 1307.4,
    "MI325X": 1307.4,
}
# Words for other chips with the same name, or for a fraction of a chip.
_OTHER_CHIPS = {"Laptop", "D", "Ti", "MIG", "Max-Q"}


def peak_flops(name: str) -> float | None:
    """Return the peak bf16 FLOPs per second of a device; None for an unknown device.

    Args:
        name: result of ``torch.cuda.get_device_name``, for example ``"NVIDIA A100-SXM4-80GB"``.

    Example:
        >>> torchtune.supervision.peak_flops("NVIDIA A100-SXM4-80GB") / 1e12
        312.0
    """
    words = set()
    for word in name.split():
        words.add(word)
        words.update(word.split("-"))  # "A100-SXM4-80GB" is an A100
    if words & _OTHER_CHIPS:
        return None
    matching_rows = [row for row in _PEAKS if words >= set(row.split())]
    if not matching_rows:
        return None
    best_row = max(matching_rows, key=lambda row: len(row.split()))
    return _PEAKS[best_row] * 1e12


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of training, forward and backward.

    Attributes:
        token: FLOPs per token, without attention.
        label: FLOPs per labeled token.
        pair: FLOPs per visible query-key pair, by the window of the layers (None: no window).
        chunked: FLOPs per visible query-key pair in layers with chunked attention, by chunk size.
        bidirectional: FLOPs per query-key pair in layers whose positions see their whole document.
    """

    token: float
    label: float
    pair: Mapping[int | None, float]
    chunked: Mapping[int, float] = field(default_factory=dict)
    bidirectional: float = 0.0

    def attention(self, lengths: Iterable[int], before: Iterable[int] | None = None) -> float:
        """Return the attention FLOPs of documents with ``lengths`` that continue from ``before`` earlier positions."""
        lengths = list(lengths)
        if before is None:
            before = [0] * len(lengths)
        flops = 0.0
        for start, length in zip(before, lengths, strict=True):
            end = start + length
            # The queries from start to end: the pairs of the whole sequence, less those of the earlier positions.
            for window, flops_per_pair in self.pair.items():
                flops += flops_per_pair * (attention_pairs(end, window) - attention_pairs(start, window))
            for size, flops_per_pair in self.chunked.items():
                flops += flops_per_pair * (_chunk_pairs(end, size) - _chunk_pairs(start, size))
            flops += self.bidirectional * (end**2 - start**2)
        return flops


def _chunk_pairs(length: int, size: int) -> int:
    """Return the number of visible query-key pairs in chunks of ``size``."""
    return length // size * attention_pairs(size, None) + attention_pairs(length % size, None)


def attention_pairs(length: int, window: int | None) -> int:
    """Return the number of query-key pairs of causal attention in one sequence.

    Args:
        length: tokens of the sequence.
        window: maximum number of keys that a query sees, itself included; None for all before it.

    Example:
        >>> torchtune.supervision.attention_pairs(4, None), torchtune.supervision.attention_pairs(4, 2)
        (10, 7)
    """
    widest = length  # keys that the last query sees
    if window is not None:
        widest = min(length, window)
    # The first queries see 1, 2, … keys, until the window is full; all later ones see a full window.
    growing = widest * (widest + 1) // 2
    full_width = (length - widest) * widest
    return growing + full_width


def count_flops(model: "nn.Module", *, labels_only: bool | None = None) -> FlopCount | None:
    """Count the training FLOPs of a decoder; None for a model without layers or with an image encoder.

    An image encoder's FLOPs depend on the number of images in a batch. In a mixture of experts (a module with
    ``experts`` and a ``router`` that has ``num_experts`` and ``experts_per_token``), only the experts to which a token
    is routed count.

    Args:
        model: converted model, possibly sharded; trained parameters require gradients.
        labels_only: whether only labeled tokens are projected to logits, as in the losses of recipes; by default as
            ``model(tokens)`` does.
    """
    from torchtune.modules.conversion import full_shapes
    from torchtune.modules.mixers import RecurrentMixer
    from torchtune.modules.transformer import text_decoder

    decoder = text_decoder(model)
    if not hasattr(decoder, "layers") or decoder is not model:  # a model around the decoder has an image encoder
        return None
    if labels_only is None:  # without the output layer, a loss projects the hidden states, of labels alone
        labels_only = getattr(decoder, "skip_output_layer", False)
    # Whether gradients flow to the input of a layer: from the first trained layer on.
    flows = any(parameter.requires_grad for parameter in decoder.tok_embeddings.parameters())
    by_token = 0.0
    by_pair: Counter[int | None] = Counter()  # window -> FLOPs per pair
    by_chunk: Counter[int] = Counter()  # size of a chunk -> FLOPs per pair
    bidirectional = 0.0
    shapes = full_shapes(model)  # of the full weights, also where a conversion stores them quantized
    if getattr(decoder, "layer_embeddings", None) is not None:
        matrix = decoder.layer_embeddings.projection.weight
        by_token += math.prod(shapes[matrix]) * _flops_per_weight(matrix, flows)
    for layer in decoder.layers:
        flows = flows or any(parameter.requires_grad for parameter in layer.parameters())
        for matrix, elements in _matrices(layer, shapes):
            by_token += elements * _flops_per_weight(matrix, flows)
        passes = 3 if flows else 1  # backward costs twice as much as forward
        for attention in (getattr(layer, "attn", None), getattr(layer, "mixer", None)):
            if attention is None:
                continue
            if isinstance(attention, RecurrentMixer):
                # Per element, the state is read by the key, corrected, and read by the query: a multiplication and an
                # addition each.
                by_token += passes * 6 * attention.state_elements
                continue
            head_dim = getattr(attention, "head_dim", decoder.head_dim)
            key_dim = getattr(attention, "key_dim", head_dim)
            value_dim = getattr(attention, "value_dim", head_dim)
            # Query times key and probability times value: a multiplication and an addition per channel.
            flops_per_pair = passes * 2 * decoder.num_heads * (key_dim + value_dim)
            chunk = getattr(attention, "chunk", None)
            if not getattr(attention, "is_causal", True):
                bidirectional += flops_per_pair
            elif chunk:
                by_chunk[chunk] += flops_per_pair
            else:
                by_pair[getattr(attention, "window", None)] += flops_per_pair
    of_output = 0.0  # per projected token
    for matrix in _output_matrices(decoder):
        of_output += matrix.numel() * _flops_per_weight(matrix, flows)
    if labels_only:
        return FlopCount(by_token, of_output, dict(by_pair), dict(by_chunk), bidirectional)
    return FlopCount(by_token + of_output, 0.0, dict(by_pair), dict(by_chunk), bidirectional)


def _flops_per_weight(matrix: "torch.Tensor", flows: bool) -> int:
    """Return FLOPs per element and token."""
    flops = 2  # forward: a multiplication and an addition
    if flows:
        flops += 2  # gradient of the input
    if matrix.requires_grad:
        flops += 2  # gradient of the weight
    return flops


def _output_matrices(decoder: "nn.Module") -> list["torch.Tensor"]:
    """Return the matrices that project hidden states to logits."""
    output = decoder.output
    if hasattr(output, "parameters"):
        weights = list(output.parameters())
    else:  # tied to the embeddings
        weights = [getattr(output, "weight", None)]
    return [weight for weight in weights if weight is not None and weight.dim() >= 2]


def _matrices(
    layer: "nn.Module", shapes: Mapping["nn.Parameter", tuple[int, ...]]
) -> Iterator[tuple["torch.Tensor", float]]:
    """Yield the matrices of a layer, with the number of their elements that a token uses."""
    shares = {}  # parameter of an expert -> share of the tokens that are routed to it
    for module in layer.modules():
        router = getattr(module, "router", None)
        if router is not None and hasattr(module, "experts"):
            share = router.experts_per_token / router.num_experts
            shares.update(dict.fromkeys(module.experts.parameters(), share))
    for parameter in layer.parameters():
        if parameter.dim() >= 2:
            yield parameter, math.prod(shapes[parameter]) * shares.get(parameter, 1.0)


def document_spans(batch: Any) -> list[tuple[int, int]]:
    """Return (length, earlier positions) of each document of a batch; without documents, of each row."""
    documents = batch.get("documents")
    if documents is not None:
        return list(zip(documents.lengths, documents.before, strict=True))
    rows, length = batch["tokens"].shape
    return [(length, 0)] * rows
