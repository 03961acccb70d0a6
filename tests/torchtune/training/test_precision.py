import pytest
import torch

from torchtune import training
from torchtune.training.precision import PRECISION_STR_TO_DTYPE, PrecisionError, verify_bf16_support
from torchtune.utils import UserError


def test_names():
    assert [training.get_dtype(name) for name in PRECISION_STR_TO_DTYPE] == list(PRECISION_STR_TO_DTYPE.values())
    assert training.get_dtype(None) is torch.float32
    assert training.get_dtype("bf16", device=torch.device("cpu")) is torch.bfloat16
    assert verify_bf16_support(torch.device("cpu"))


def test_an_unknown_name_is_a_user_error_and_a_value_error():
    with pytest.raises(PrecisionError, match="dtype: 'bfloat' is not known: use one of fp16, bf16, fp32, fp64"):
        training.get_dtype("bfloat")
    assert issubclass(PrecisionError, UserError)
    assert issubclass(PrecisionError, ValueError)


def test_default_dtype_comes_back_after_an_error():
    before = torch.get_default_dtype()
    with training.set_default_dtype(torch.bfloat16):
        assert torch.zeros(1).dtype is torch.bfloat16
    with pytest.raises(KeyError), training.set_default_dtype(torch.float64):
        raise KeyError
    assert torch.get_default_dtype() is before


def test_expected_dtype():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    named = list(model.named_parameters())
    training.validate_expected_param_dtype(named, torch.float32, exclude_param_names=["1.weight", "1.bias"])
    with pytest.raises(ValueError, match=r"Parameter 1\.weight has type torch\.bfloat16, expected torch\.float32"):
        training.validate_expected_param_dtype(named, torch.float32)
