"""Names, arguments and results of earlier releases: what users wrote then runs, or says what replaces it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import write_checkpoint, write_lines
from tests.torchtune.compat.users import own_script
from torchtune.checkpoints import CheckpointError
from torchtune.compat import (
    SUFFIXES_TO_NOT_COPY,
    TuneRecipeArgumentParser,
    check_outdir_not_in_ckptdir,
    copy_files,
    get_adapter_checkpoint_path,
    get_model_checkpoint_path,
    get_recipe_checkpoint_path,
    load_dora_magnitudes,
    update_stop_tokens_tracker,
    validate_state_dict_for_lora,
)
from torchtune.compat._former_names import GONE, MODULES, NAMES
from torchtune.config import InstantiationError, locate, log_config
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, collate_documents, padded_collate_packed
from torchtune.datasets import PackedDataset
from torchtune.models.clip import CLIPImageTransform
from torchtune.models.llama3 import lora_llama3
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.loss import LinearCrossEntropyLoss, setup_loss
from torchtune.modules.model_fusion import FusionEmbedding, FusionLayer
from torchtune.modules.peft import DoRALinear
from torchtune.utils import UserError

USERS = Path(__file__).parent / "users"


def object_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", [path for path in NAMES if path.startswith("torchtune.")])
def test_a_former_name_is_the_present_object(path):
    assert object_at(path) is object_at(NAMES[path])


@pytest.mark.parametrize("module", MODULES)
def test_a_former_module_has_the_names_of_the_present_one(module):
    assert importlib.import_module(module).__name__ == module
    assert importlib.import_module(MODULES[module])
    missing = f"module '{module}' has no attribute 'no_such_name'"
    with pytest.raises(AttributeError, match=GONE.get(module, missing)[:40]):
        object_at(f"{module}.no_such_name")


def test_a_former_name_warns_once_with_the_present_path(caplog):
    code = (
        "import torchtune.modules.peft.peft_utils as peft_utils\n"
        "from torchtune.modules.peft.peft_utils import get_adapter_params\n"
        "from torchtune.modules.peft.peft_utils import get_adapter_params as again\n"
        "from torchtune.modules import peft\n"
        "assert get_adapter_params is again is peft.get_adapter_params is peft_utils.get_adapter_params\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "WARNING:torchtune:torchtune.modules.peft.peft_utils.get_adapter_params has moved to "
        "torchtune.modules.peft.get_adapter_params: update the import, or the path in the config."
    ]


@pytest.mark.parametrize("path", GONE)
def test_import_of_a_removed_name_says_what_replaces_it(path):
    reason = GONE[path]
    module, _, name = path.rpartition(".")
    if path not in MODULES:
        with pytest.raises(ImportError) as caught:
            exec(f"from {module} import {name}")
        assert str(caught.value) == f"{path} is not part of this library: {reason}"
    with pytest.raises(InstantiationError) as refused:
        locate(f"{path}.something")
    assert str(refused.value) == f"{path}.something is not part of this library: {reason}"


def test_attribute_that_was_removed_says_what_replaces_it():
    data = importlib.import_module("torchtune.data")
    assert not hasattr(data, "ChatFormat")
    with pytest.raises(AttributeError, match="tokenizers lay out chats themselves"):
        _ = data.ChatFormat


def test_modules_that_never_existed_are_not_found():
    for name in ("torchtune.data._nothing", "torchtune.models.llama3._nothing", "torchtune.nothing"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
            importlib.import_module(name)


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", tied=False)
    rows = [{"question": f"Where is cat {number}?", "answer": f"On mat {number}."} for number in range(8)]
    write_lines(tmp_path / "rows.jsonl", rows)
    return tmp_path


CONFIG = """
# what people keep at the top
root: {folder}
model_dir: ${{root}}/checkpoint
paths:
  data: ${{root}}/rows.jsonl
run_name: first try
output_dir: ${{root}}/${{run}}
run: out

model:
  _component_: torchtune.models.llama3.lora_llama3
  lora_attn_modules: [q_proj, v_proj]
  lora_rank: 2
  lora_alpha: 4
  vocab_size: {vocab_size}
  num_layers: 2
  num_heads: 4
  num_kv_heads: 2
  embed_dim: 32
  intermediate_dim: 64
  max_seq_len: 4096
  rope_base: 10000
tokenizer:
  _component_: torchtune.tokenizers.hf_tokenizer
  path: ${{model_dir}}
  max_seq_len: 64
checkpointer:
  _component_: torchtune.utils.FullModelHFCheckpointer
  checkpoint_dir: ${{model_dir}}
  checkpoint_files: [model.safetensors]
  model_type: LLAMA3
  output_dir: ${{output_dir}}
dataset:
  _component_: own_dataset.questions_dataset
  source: json
  data_files: ${{paths.data}}
  split: train
  template: {{user: ["Q: ", ""]}}
optimizer:
  _component_: torch.optim.AdamW
  lr: 1e-3
lr_scheduler:
  _component_: torchtune.modules.get_cosine_schedule_with_warmup
  num_warmup_steps: 1
loss:
  _component_: torch.nn.CrossEntropyLoss
metric_logger:
  _component_: torchtune.utils.metric_logging.DiskLogger
  log_dir: ${{output_dir}}/logs
batch_size: 2
max_steps_per_epoch: 2
device: cpu
dtype: fp32
seed: 5
"""


def test_a_recipe_a_dataset_and_a_config_of_a_user_run(folder, tune, monkeypatch, caplog):
    vocabulary = json.loads((folder / "checkpoint" / "config.json").read_text())["vocab_size"]
    config = folder / "own.yaml"
    config.write_text(CONFIG.format(folder=folder, vocab_size=vocabulary))
    (folder / "out").mkdir()
    # Another test of this process may have used the former name, and the module keeps its object.
    former_module = importlib.import_module("torchtune.utils.metric_logging")
    monkeypatch.delattr(former_module, "DiskLogger", raising=False)
    monkeypatch.chdir(USERS)
    monkeypatch.syspath_prepend(USERS)
    result = tune("run", "own_recipe.py", "--config", config)
    assert result.code == 0, result.err
    assert "own_recipe.py never reads run_name" in caplog.text
    assert (
        "torchtune.utils.metric_logging.DiskLogger has moved to torchtune.training.metric_logging.DiskLogger"
        in caplog.text
    )
    assert len(list((folder / "out" / "logs").iterdir())) >= 1
    refused = tune("run", "own_recipe.py", "--config", config, "run_nmae=second")
    assert (refused.code, "command line: run_nmae: is never read by own_recipe.py" in refused.err) == (2, True)


def test_a_script_of_a_user_trains():
    first, second = own_script.take_steps(2)
    assert second < first


def test_arguments_of_earlier_releases_are_accepted_or_explained(tune, caplog):
    shipped = "smol/135M_lora_single_device"
    assert tune("validate", shipped, "dataset.trust_remote_code=True").code == 0
    assert "alpaca_cleaned_dataset ignores 'trust_remote_code': it has no effect any more" in caplog.text
    dataset = "dataset={_component_: torchtune.datasets.instruct_dataset, source: a/b, template: c, max_seq_len: 3}"
    refused = tune("validate", shipped, dataset)
    assert (
        "instruct_dataset takes no argument 'template' any more: instruct templates are gone since 0.4" in refused.err
    )
    assert "takes no argument 'max_seq_len' any more: set `tokenizer.max_seq_len`." in refused.err


def test_moved_paths_of_other_packages_are_followed(caplog):
    optim = pytest.importorskip("torchao.optim")
    assert locate("torchao.prototype.low_bit_optim.AdamW8bit") is optim.AdamW8bit
    assert "torchao.prototype.low_bit_optim.AdamW8bit has moved to torchao.optim.AdamW8bit" in caplog.text


def test_a_pack_is_read_as_the_padded_row_that_it_was():
    rows = [{"tokens": [1, 2, 3], "labels": [2, 3, -100]}, {"tokens": [4, 5], "labels": [5, -100]}]
    pack = PackedDataset(rows, max_seq_len=8, padding_idx=9)[0]
    assert {name: values.tolist() for name, values in dict(pack).items()} == {
        "tokens": [1, 2, 3, 4, 5, 9, 9, 9],
        "labels": [2, 3, -100, 5, -100, *[CROSS_ENTROPY_IGNORE_IDX] * 3],
        "input_pos": [0, 1, 2, 0, 1, 2, 3, 4],
        "seq_lens": [3, 2, 3],
    }
    assert [document["tokens"].tolist() for document in pack] == [[1, 2, 3], [4, 5]]
    with pytest.raises(KeyError, match="mask"):
        _ = pack["mask"]
    full = PackedDataset(rows, max_seq_len=5)[0]
    assert full["seq_lens"].tolist() == [3, 2]


def test_a_pack_of_a_users_own_dataset_is_split_into_its_documents():
    pack = {
        "tokens": torch.tensor([1, 2, 3, 4, 5, 0]),
        "labels": torch.tensor([2, 3, -100, 5, -100, -100]),
        "input_pos": torch.tensor([0, 1, 2, 0, 1, 2]),
        "seq_lens": torch.tensor([3, 2, 1]),
    }
    assert padded_collate_packed([pack])["input_pos"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert list(collate_documents([pack]).documents.lengths) == [3, 2, 1]
    with pytest.raises(UserError, match="A pack has 6 tokens, and seq_lens of 5 in total"):
        padded_collate_packed([{**pack, "seq_lens": torch.tensor([3, 2])}])


class OwnLayer(nn.Module):
    """A layer that is none of the library's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.sizes = None

    def setup_caches(self, batch_size, dtype, *, encoder_max_seq_len, decoder_max_seq_len):
        self.sizes = (batch_size, encoder_max_seq_len, decoder_max_seq_len)

    def caches_are_setup(self):
        return self.sizes is not None

    caches_are_enabled = caches_are_setup

    def reset_cache(self):
        self.sizes = None

    def forward(self, x, **kwargs):
        return nn.functional.dropout(self.linear(x), 0.5, self.training) * self.scale


def test_functions_of_vision_utils_are_in_modules_of_their_names():
    utils = "torchtune.modules.transforms.vision_utils"
    names = ("find_supported_resolutions", "get_canvas_best_fit")
    canvases, best_fit = (getattr(importlib.import_module(f"{utils}.get_canvas_best_fit"), name) for name in names)
    inscribed, pad, resize, crop = (
        getattr(importlib.import_module(f"{utils}.{name}"), name)
        for name in ("get_inscribed_size", "pad_dim_to_size", "resize_with_pad", "tile_crop")
    )
    image = torch.ones(1, 2, 5)
    canvas = best_fit(image, torch.tensor(canvases(2, 4)), resize_to_max_canvas=False)
    assert (canvas, inscribed((2, 5), canvas, max_size=None)) == ((4, 8), (3, 8))
    tiles = crop(resize(image, canvas, "bilinear"), 4)
    assert pad(tiles, 3, dim=0, fill=2.0).sum(dim=(1, 2, 3)).tolist() == [12.0, 12.0, 32.0]
    with pytest.raises(UserError, match=r"Dimension 1 of a tensor .* is longer than the size 2"):
        pad(torch.zeros(1, 6, 8), 2, 1)
    import torchtune.modules.transforms.vision_utils.tile_crop as module

    assert module.tile_crop is crop


def test_fusion_layer_takes_a_layer_of_the_users():
    layer, fused = OwnLayer(), OwnLayer()
    fusion = FusionLayer(layer, fused, fusion_first=False).eval()
    x = torch.rand(2, 3, 4)
    torch.testing.assert_close(fusion(x, encoder_input=None), fused.eval()(layer(x)))
    names = ["linear.weight", "linear.bias", "scale", "fusion_layer.linear.weight", "fusion_layer.linear.bias"]
    assert {*fusion.state_dict()} == {*names, "fusion_layer.scale"}
    assert {name for name, _ in fusion.named_parameters()} == {*names} - {"scale"}
    assert fusion.fusion_params() == ["fusion_layer.linear.weight", "fusion_layer.linear.bias"]
    assert fusion.layer is layer
    fusion.setup_caches(2, torch.float32, encoder_max_seq_len=5, decoder_max_seq_len=7)
    assert layer.sizes == fused.sizes == (2, 5, 7)
    assert fusion.caches_are_enabled()
    fusion.reset_cache()
    assert not fusion.caches_are_setup()
    fusion.train()
    assert layer.training
    fusion.linear = nn.Identity()  # as a conversion replaces it
    assert isinstance(layer.linear, nn.Identity)
    first = FusionLayer(OwnLayer(), fused)
    assert isinstance(first, FusionLayer)
    assert isinstance(first, TransformerSelfAttentionLayer)


def test_fusion_embedding_keeps_its_first_embedding():
    embedding = FusionEmbedding(10, 2, 4)
    assert embedding.embedding.weight is embedding.weight
    assert {*embedding.state_dict()} == {"weight", "fusion_embedding.weight"}


def test_canvases_of_partial_tiles_are_refused_where_they_are_used():
    transform = CLIPImageTransform(possible_resolutions=[(8, 8), (9, 30)], tile_size=4, max_num_tiles=None)
    assert transform({"image": torch.zeros(3, 8, 8)})["image"].shape == (4, 3, 4, 4)
    with pytest.raises(UserError, match="9 x 30, which fits an image of 3 x 10 best, is not of whole tiles of 4"):
        transform({"image": torch.zeros(3, 3, 10)})


def test_helpers_find_and_copy_the_files_of_a_checkpoint(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    output = tmp_path / "out"
    (checkpoint / ".cache").mkdir(parents=True)
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors", ".cache/secret"):
        (checkpoint / name).write_text(name)
    copy_files(checkpoint, output, ignore_suffixes=SUFFIXES_TO_NOT_COPY)
    assert [path.name for path in output.rglob("*")] == ["config.json"]
    assert check_outdir_not_in_ckptdir(checkpoint, output)
    with pytest.raises(CheckpointError, match="is inside the checkpoint's folder"):
        check_outdir_not_in_ckptdir(checkpoint, checkpoint / "run")
    files = ["model-2.safetensors", "model-1.safetensors"]
    paths = get_model_checkpoint_path(files, checkpoint, output, False, False)
    assert paths == [checkpoint / "model-1.safetensors", checkpoint / "model-2.safetensors"]
    with pytest.raises(CheckpointError, match="has no file model-3"):
        get_model_checkpoint_path(["model-3"], checkpoint, output, False, False)
    assert get_recipe_checkpoint_path(output, checkpoint) is None
    assert get_adapter_checkpoint_path(output, should_load_recipe_state=True) is None
    with pytest.raises(CheckpointError, match=r"recipe_state.pt does not exist: set resume_from_checkpoint to False"):
        get_recipe_checkpoint_path(output, checkpoint, should_load_recipe_state=True)
    (output / "epoch_1").mkdir()
    for name in ("adapter_model.pt", "recipe_state.pt", "model-1.safetensors"):
        (output / "epoch_1" / name).touch()
    resumed = {"should_load_recipe_state": True}
    assert get_recipe_checkpoint_path(output, checkpoint, **resumed) == output / "epoch_1" / "recipe_state.pt"
    assert get_adapter_checkpoint_path(output, **resumed) == output / "epoch_1" / "adapter_model.pt"
    expected = [output / "epoch_1" / "model-1.safetensors"]
    assert get_model_checkpoint_path(files[1:], checkpoint, output, True, False) == expected


@pytest.mark.parametrize("kind", [LinearCrossEntropyLoss, lambda: nn.CrossEntropyLoss(reduction="none")])
def test_losses_of_single_tokens_by_the_former_context_manager(kind):
    keep_row_losses = importlib.import_module("torchtune.modules.loss").keep_row_losses
    hidden = torch.randn(1, 3, 8)
    labels = torch.tensor([[5, -100, 7]])
    model = nn.ModuleDict({"output": nn.Linear(8, 16, bias=False)})
    model.output = model["output"]
    loss = setup_loss(kind(), model)
    with keep_row_losses() as row_losses:
        loss.sum_and_count(hidden, labels, model.output)
    loss.sum_and_count(hidden, labels, model.output)  # after the block nothing is recorded
    expected = nn.functional.cross_entropy(model.output(hidden)[0], labels[0], reduction="none")[[0, 2]]
    torch.testing.assert_close(torch.cat(row_losses), expected.detach())


def test_helpers_of_earlier_scripts_work(tmp_path):
    reached = torch.tensor([False, True, False])
    update_stop_tokens_tracker(torch.tensor([[7], [1], [2]]), torch.tensor([7, 8]), reached)
    assert reached.tolist() == [True, True, False]
    model = lora_llama3(["q_proj"], lora_rank=2, lora_alpha=4, use_dora=True, **own_script.SIZES)
    dora = next(module for module in model.modules() if isinstance(module, DoRALinear))
    nn.init.zeros_(dora.magnitude)
    load_dora_magnitudes(model)
    torch.testing.assert_close(dora.magnitude, torch.linalg.norm(dora.weight, dim=1))
    keys = [*model.state_dict()]
    adapter = [key for key in keys if "lora" in key or "magnitude" in key]
    base = [key for key in keys if key not in adapter]
    validate_state_dict_for_lora(["q_proj"], False, False, keys, adapter, base)
    with pytest.raises(AssertionError, match="The adapter does not fit the model: missing"):
        validate_state_dict_for_lora(["q_proj"], False, False, keys, adapter[1:], base)
    config_utils = importlib.import_module("torchtune.config._utils")
    assert config_utils._get_component_from_path("torch.nn.Linear") is nn.Linear
    assert config_utils._has_component({"_component_": "a.b"})
    assert config_utils.log_config is log_config
    merge = config_utils._merge_yaml_and_cli_args
    (tmp_path / "c.yaml").write_text("model: {_component_: a.b, size: 2}\nlr: 2e-5\n")
    parsed, unknown_arguments = TuneRecipeArgumentParser().parse_known_args(
        ["--config", str(tmp_path / "c.yaml"), "model=c.d"]
    )
    assert merge(parsed, [*unknown_arguments, "model.size=3"]) == {
        "model": {"_component_": "c.d", "size": 3},
        "lr": 2e-5,
    }
    with pytest.raises(UserError, match="--lr is not an option of a recipe: settings are written key=value"):
        TuneRecipeArgumentParser().parse_known_args(["--config", str(tmp_path / "c.yaml"), "--lr"])


def test_conversions_of_gemma_2_are_inverse():
    convert = importlib.import_module("torchtune.models.gemma2._convert_weights")
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ]
    hf_weights = {}
    for name in names:
        shape = (8, 8) if "proj" in name else (8,)
        hf_weights[name] = torch.rand(shape)
    converted = convert.gemma2_hf_to_tune(hf_weights, num_heads=2, num_kv_heads=2, dim=8)
    assert {*converted} == {
        "tok_embeddings.weight",
        "layers.0.attn.q_proj.weight",
        "layers.0.mlp_norm.scale",
        "layers.0.sa_scale.scale",
    }
    back = convert.gemma2_tune_to_hf(converted, num_heads=2, num_kv_heads=2, dim=8)
    assert all(torch.equal(back[name], hf_weights[name]) for name in names)
