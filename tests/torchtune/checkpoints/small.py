"""Small random models in folders, as other tools write them, and how the tests look at them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.tiny import write_tokenizer
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer, ModelSource
from torchtune.models import from_hf_config
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import apply_conversions

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "head_dim": 8,
    "global_head_dim": 16,
}
# Their configs have the word Text in their names.
OF_TEXT = ("Llama4", "Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
# Name -> architecture of transformers, and what it says beyond the sizes.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
    "gemma4_experts": (
        "Gemma4",
        {**_GEMMA4, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 24, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_shared_keys": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "phi3": ("Phi3", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def config_class(architecture: str) -> Any:
    """The class of transformers for the config of a text model."""
    return getattr(transformers, f"{architecture}{'Text' if architecture in OF_TEXT else ''}Config")


def random_hf_model(
    architecture: str, settings: dict[str, Any], task: str = "ForCausalLM", seed: int = 0
) -> torch.nn.Module:
    """A random model of transformers, with norms and biases that matter."""
    torch.manual_seed(seed)
    config = config_class(architecture)(**settings)
    if architecture == "Gemma2":
        config._attn_implementation = "eager"  # the only one with soft caps
    of_text = {"Gemma3": "Gemma3Text"}.get(architecture, architecture) if task != "ForCausalLM" else architecture
    hf = getattr(transformers, f"{of_text}{task}")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in hf.named_parameters():
            if "norm" in parameter_name:
                parameter.normal_(1.0, 0.3)
            elif parameter_name.endswith("A_log"):
                parameter.uniform_(-4, 0)  # states that last
            elif parameter_name.endswith(("bias", "sinks", ".D")):
                parameter.normal_()
            elif parameter_name.endswith("scale"):
                parameter.normal_(1.0, 0.3)
        for buffer_name, buffer in hf.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4)
            elif buffer_name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.uniform_(-0.5, 0.5)  # scores lie between 0 and 1
    return hf


def hf_model(
    shape: str | tuple[str, dict], dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any
) -> torch.nn.Module:
    """A random model of transformers, of a row of SHAPES or another."""
    architecture, options = SHAPES[shape] if isinstance(shape, str) else shape
    return random_hf_model(architecture, {**SIZES, **options, **sizes}, seed=seed).to(dtype)


def write_folder(
    folder: Path, shape: str | tuple[str, dict] = "llama", dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """A complete Hugging Face folder; ``max_shard_size`` goes to ``save_pretrained``, other options to the model."""
    shards = {"max_shard_size": options.pop("max_shard_size")} if "max_shard_size" in options else {}
    hf_model(shape, dtype, **options).save_pretrained(folder, **shards)
    write_tokenizer(folder)
    return folder


def build(folder: Path, *conversions: Any, dtype: torch.dtype = torch.float32) -> TransformerDecoder:
    """Our model of a folder, on the meta device."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = from_hf_config(folder)
            apply_conversions(model, list(conversions))
    finally:
        torch.set_default_dtype(previous)
    return model


def load(folder: Path, *conversions: Any, dtype: torch.dtype = torch.float32, **options: Any) -> TransformerDecoder:
    """Our model of a folder, with its weights."""
    model = build(folder, *conversions, dtype=dtype)
    FullModelHFCheckpointer(folder, **options).load_model(model)
    return model.eval()


def started(
    source: Path, *conversions: Any, output: Path | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[FullModelHFCheckpointer, TransformerDecoder]:
    """A checkpointer of a folder that saves into ``output`` (beside it, ``out``), and its model with the weights."""
    checkpointer = FullModelHFCheckpointer(source, output_dir=output or source.parent / "out", **options)
    model = build(source, *conversions, dtype=dtype)
    checkpointer.load_model(model)
    return checkpointer, model.eval()


def resume(checkpointer: FullModelHFCheckpointer, model: torch.nn.Module, **state: Any) -> dict[str, Any]:
    """Resume from the newest checkpoint; the state that was read, beside the progress."""
    state.setdefault("progress", {})
    checkpointer.resume(checkpointer.find_resume_point(), model, state)
    return state


def in_transformers(folder: Path, **options: Any) -> torch.nn.Module:
    """A folder's model as transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def in_peft(base: torch.nn.Module, adapter: Path) -> torch.nn.Module:
    """A model of transformers with an adapter's folder, as peft loads it."""
    return peft.PeftModel.from_pretrained(base, adapter).eval()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that logits are equal but for rounding."""
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def some_tokens() -> torch.Tensor:
    """[2, 24] token ids."""
    return torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """float32 logits of :func:`some_tokens` by our model or one of transformers: [2, 24, v]."""
    out = model(some_tokens())
    return (out if isinstance(out, torch.Tensor) else out.logits).float()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the safetensors files of a folder's model."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return tensors


def open_files(paths: list[Path]) -> Any:
    """Weight files of one folder, opened."""
    return ModelSource(paths[0].parent, [path.name for path in paths]).open()


def write_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the weights of a folder with one file."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two dicts hold the same tensors, dtypes and bits."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def read(path: Path) -> Any:
    """Contents of a JSON file."""
    return json.loads(path.read_text())


def randomize_adapter(model: torch.nn.Module, seed: int = 3) -> None:
    """Give every adapter parameter a value that shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                _put(parameter, torch.randn(parameter.shape, generator=generator) * 0.2)
            elif name.endswith("magnitude"):
                old = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                _put(parameter, old * (1 + 0.2 * torch.rand(parameter.shape, generator=generator).to(old.device)))


def _put(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a rank's own elements: for each shape, a DTensor would derive placements anew."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
        parameter = parameter.to_local()
    parameter.copy_(value)


def refusal(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The one sentence with which a call is refused."""
    with pytest.raises(CheckpointError) as caught:
        function(*args, **options)
    text = str(caught.value)
    assert "\n" not in text, text
    assert ". " not in text, text
    assert text.endswith("."), text
    return text


def leave_free(disk: Path, free: int) -> Path:
    """Fill the disk but for ``free`` bytes."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    status = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - free)
    return filler
