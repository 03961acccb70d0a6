"""Storage formats of weights in four and eight bits, against their definitions in float64."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.torchtune.modules.low_precision.small import nf4_in_float64
from torchtune.modules.conversion import ConversionError
from torchtune.modules.low_precision import formats
from torchtune.modules.low_precision.formats import NF4, Float8, Int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_stores_the_nearest_level_of_each_element(dtype):
    torch.manual_seed(0)
    weight = (torch.randn(3, 5, 128) * torch.rand(3, 5, 1)).to(dtype)
    weight[0, 0] = 0.0
    weight_format = NF4(dtype)
    tensors = weight_format.encode(weight)
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 5, 64), (3, 5, 2), (3, 5, 2)]
    exact = torch.nan_to_num(nf4_in_float64(weight, 64))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(weight_format.decode(*tensors).double(), exact, rtol=tolerance, atol=1e-9)


def test_nf4_keeps_the_first_of_two_columns_in_the_high_bits():
    weight = torch.tensor([[1.0, -1.0, 0.0, 1.0]])
    packed, scale_codes, scale_range = NF4(torch.float32, block_size=4).encode(weight)
    # Codes 15 and 0, then 7 and 15; one block, so the scales of the row have no extent.
    assert packed.tolist() == [[0xF0, 0x7F]]
    assert scale_codes.tolist() == [[0]]
    assert scale_range.view(torch.float32).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("order", [("fake", "real", "fake"), ("real", "fake", "real")])
def test_nf4_of_simulated_runs_is_decoded_beside_real_values(order, monkeypatch):
    """Values of a simulation are shapes alone: they neither use a table of real levels nor leave one behind."""
    monkeypatch.setattr(formats, "_BYTE_TO_LEVELS", {})
    weight = torch.tensor([[1.0, -1.0, 0.0, 1.0]])  # levels themselves
    weight_format = NF4(torch.float32, block_size=4)
    stored = weight_format.encode(weight)
    for kind in order:
        if kind == "real":
            assert torch.equal(weight_format.decode(*stored), weight)
            continue
        with FakeTensorMode() as mode:
            decoded = weight_format.decode(*(mode.from_tensor(tensor) for tensor in stored))
        assert decoded.shape == weight.shape


def test_nf4_errs_as_little_as_torchaos():
    """The levels are equal where both double quantizations are exact, and as near elsewhere."""
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    weight = torch.randn(64, 1024)
    reference = torchao.to_nf4(weight, 64, 256).get_original_weight()
    decoded = NF4(torch.float32).decode(*NF4(torch.float32).encode(weight))
    assert (decoded - weight).norm() < 1.005 * (reference - weight).norm()
    assert (decoded - reference).norm() < 0.2 * (reference - weight).norm()


@pytest.mark.parametrize(("format_class", "largest_value"), [(Int8, 127), (Float8, 448)])
def test_eight_bits_are_rounded_multiples_of_the_scale_of_a_row(format_class, largest_value):
    torch.manual_seed(0)
    weight = torch.randn(6, 32)
    scale = weight.double().abs().amax(1, keepdim=True) / largest_value
    scaled = weight.double() / scale
    rounded = scaled.round() if format_class is Int8 else scaled.to(torch.float8_e4m3fn).double()
    weight_format = format_class(torch.float32)
    decoded = weight_format.decode(*weight_format.encode(weight))
    torch.testing.assert_close(decoded.double(), rounded * scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("format_class", [NF4, Int8, Float8])
def test_a_row_of_zeros_is_decoded_to_zeros(format_class):
    weight_format = format_class(torch.bfloat16)
    assert torch.equal(
        weight_format.decode(*weight_format.encode(torch.zeros(2, 64))), torch.zeros(2, 64, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("format_class", [NF4, Int8, Float8])
def test_chunks_of_rows_are_quantized_as_the_whole_weight(format_class, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(2, 5, 64)
    weight_format = format_class(torch.float32)
    at_once = weight_format.encode(weight)
    monkeypatch.setattr(formats, "_ELEMENTS_AT_ONCE", 3 * 64)  # three rows, which do not divide ten
    for tensor, expected in zip(weight_format.encode(weight), at_once, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("format_class", [NF4, Int8, Float8])
def test_stored_tensors_keep_their_dtype_when_a_module_is_cast(format_class):
    module = nn.Module()
    for name, tensor in enumerate(format_class(torch.float32).encode(torch.randn(2, 64))):
        module.register_buffer(f"stored_{name}", tensor)
    dtypes = [tensor.dtype for tensor in module.buffers()]
    assert [tensor.dtype for tensor in module.to(torch.bfloat16).buffers()] == dtypes


@pytest.mark.parametrize("block_size", [-2, 0, 1, 7])
def test_odd_blocks_of_nf4_are_refused(block_size):
    with pytest.raises(ConversionError, match=f"block_size is {block_size}, give an even number"):
        NF4(torch.float32, block_size)
