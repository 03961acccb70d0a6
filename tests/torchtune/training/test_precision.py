import json
from types import SimpleNamespace

import pytest
import torch

from torchtune import estimate, training
from torchtune.models import stored_dtype
from torchtune.training import precision
from torchtune.training.precision import PRECISION_STR_TO_DTYPE, PrecisionError, verify_bf16_support
from torchtune.utils import UserError, simulated


def test_dtypes_have_names():
    assert [training.get_dtype(name) for name in PRECISION_STR_TO_DTYPE] == list(PRECISION_STR_TO_DTYPE.values())
    assert training.get_dtype(None) is torch.float32
    assert training.get_dtype("bf16", device=torch.device("cpu")) is torch.bfloat16
    assert verify_bf16_support(torch.device("cpu"))


def test_an_unknown_name_is_a_user_error_and_a_value_error():
    with pytest.raises(PrecisionError, match="dtype: 'bfloat' is not known: use one of fp16, bf16, fp32, fp64"):
        training.get_dtype("bfloat")
    assert issubclass(PrecisionError, UserError)
    assert issubclass(PrecisionError, ValueError)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_default_dtype_is_one_that_the_cpu_computes_fast(has_bf16, monkeypatch, caplog):
    monkeypatch.setattr(precision, "onednn_computes", lambda dtype: has_bf16)
    cpu = torch.device("cpu")
    fast = ("bf16", torch.bfloat16) if has_bf16 else ("fp32", torch.float32)
    assert training.choose_dtype(None, cpu) == training.choose_dtype(None, cpu, torch.bfloat16) == fast
    assert training.choose_dtype(None, cpu, torch.float32) == ("fp32", torch.float32)
    with caplog.at_level("WARNING"):
        assert training.choose_dtype("bf16", cpu) == ("bf16", torch.bfloat16)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([] if has_bf16 else [precision.emulation_warning("bf16", cpu)])
    with simulated():  # tensors stand for those of an accelerator
        assert training.choose_dtype(None, cpu) == ("bf16", torch.bfloat16)
    model = {"_component_": "torchtune.models.smol.smollm2_135m"}
    settings = SimpleNamespace(model=model, model_converters=[], tokenizer=None, dtype=None, device="cpu")
    plan_of_default = estimate.plan_run(settings)
    assert f"smollm2_135m, {'bfloat16' if has_bf16 else 'float32'}" in plan_of_default
    assert "emulates" not in plan_of_default
    settings.dtype = "bf16"
    assert ("only emulates bf16" in estimate.plan_run(settings)) == (not has_bf16)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_default_dtype_is_one_that_the_gpu_computes_fast(has_bf16, monkeypatch):
    """GPUs before compute capability 8.0 only emulate bf16, and have units for fp16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16 or including_emulation
    )
    gpu = torch.device("cuda")
    fast = ("bf16", torch.bfloat16) if has_bf16 else ("fp16", torch.float16)
    assert training.choose_dtype(None, gpu) == training.choose_dtype(None, gpu, torch.bfloat16) == fast
    assert training.choose_dtype(None, gpu, torch.float32) == ("fp32", torch.float32)
    assert ("set dtype=fp16" in precision.emulation_warning("bf16", gpu)) == (not has_bf16)


def test_stored_dtype_is_read_from_the_config_of_a_checkpoint(tmp_path):
    assert stored_dtype(None) is None
    assert stored_dtype(tmp_path) is None
    for config, expected in (
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "int8"}, None),
        ({"dtype": 3}, None),
        ({}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
        assert stored_dtype(tmp_path) is expected


def test_default_dtype_comes_back_after_an_error():
    before = torch.get_default_dtype()
    with training.set_default_dtype(torch.bfloat16):
        assert torch.zeros(1).dtype is torch.bfloat16
    with pytest.raises(KeyError), training.set_default_dtype(torch.float64):
        raise KeyError
    assert torch.get_default_dtype() is before


def test_parameter_of_another_dtype_is_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    named = list(model.named_parameters())
    training.validate_expected_param_dtype(named, torch.float32, exclude_param_names=["1.weight", "1.bias"])
    with pytest.raises(ValueError, match=r"Parameter 1\.weight has type torch\.bfloat16, expected torch\.float32"):
        training.validate_expected_param_dtype(named, torch.float32)
