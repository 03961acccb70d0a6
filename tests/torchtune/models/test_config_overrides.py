"""Fields of config.json that a run replaces, such as those of a longer context, as transformers computes with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.torchtune.checkpoints.small import write_folder
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.models import ModelError, from_hf_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGER = {"max_position_embeddings": 256, "rope_scaling": YARN}
TOKENS = torch.randint(3, 300, (1, 200), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", params=["rope_parameters", "rope_scaling"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for 64 positions, whose config.json is of transformers 5, or of earlier releases."""
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    shape = ("Qwen3", {"head_dim": 16, "max_position_embeddings": 64, "rope_parameters": rope})
    folder = write_folder(tmp_path_factory.mktemp("short"), shape)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if request.param == "rope_scaling":
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(config))
    return folder


def in_transformers(folder: Path, **changes: Any) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def test_longer_context_is_that_of_transformers_and_is_exported(folder: Path, tmp_path: Path) -> None:
    model = from_hf_config(folder, config_overrides=LONGER).eval()
    store = FullModelHFCheckpointer(folder, output_dir=tmp_path)
    store.load_model(model)
    reference = in_transformers(folder, max_position_embeddings=256, rope_parameters={**YARN, "rope_theta": 50_000.0})
    with torch.no_grad():
        logits = model(TOKENS)
        expected = reference(TOKENS).logits
        plain = in_transformers(folder)(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, plain, atol=1e-2)
    store.save("epoch_0", model, contents="model", tokenizer=None)
    with torch.no_grad():
        exported = in_transformers(tmp_path / "epoch_0")(TOKENS).logits
    torch.testing.assert_close(exported, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_positions": 256}, "no field 'max_positions'; did you mean 'max_position_embeddings'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn': give an object"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 4.0}}, "rope_"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings = 'long', where a whole number"),
    ],
)
def test_mistaken_override_is_refused(folder: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf_config(folder, config_overrides=overrides)


def test_rope_that_differs_by_kind_of_layer_is_not_overridden(tmp_path: Path) -> None:
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    config = {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": by_kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="differs by kind of layer"):
        from_hf_config(tmp_path, config_overrides={"rope_scaling": YARN})
