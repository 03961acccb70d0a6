"""Full state dicts in and out of models: what older recipes rely on, in one process."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtune import training
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer
from torchtune.config import load_and_check
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules import classifier_model
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA, get_adapter_params
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress
from torchtune.utils import UserError

NUMBERS = {
    "vocab_size": 40,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "embed_dim": 16,
    "max_seq_len": 32,
    "intermediate_dim": 32,
}
CPU = torch.device("cpu")


def on_meta(builder=llama3, *args, **options):
    with torch.device("meta"):
        return builder(*args, **NUMBERS, **options)


def test_meta_model_is_materialized_from_a_full_state_dict():
    source = llama3(**NUMBERS)
    target = on_meta()
    state = dict(source.state_dict())
    load_result = training.load_from_full_model_state_dict(target, state, CPU, strict=True)
    assert (load_result.missing_keys, load_result.unexpected_keys) == ([], [])
    assert all(torch.equal(tensor, target.state_dict()[name]) for name, tensor in source.state_dict().items())
    assert state.keys() == source.state_dict().keys(), "a recipe asks later whether it had any"
    assert not any(isinstance(value, torch.Tensor) for value in state.values())


def test_loaded_model_keeps_its_dtype_and_trained_parameters():
    with training.set_default_dtype(torch.bfloat16):
        target = on_meta()
    target.norm.scale.requires_grad_(False)
    state = dict(llama3(**NUMBERS).state_dict())
    training.load_from_full_model_state_dict(target, state, CPU, release_sd=False)
    assert {parameter.dtype for parameter in target.parameters()} == {torch.bfloat16}
    assert [name for name, parameter in target.named_parameters() if not parameter.requires_grad] == ["norm.scale"]
    assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_missing_and_unexpected_names_are_returned_or_refused():
    state = dict(llama3(**NUMBERS).state_dict()) | {"exploration.weight": torch.ones(1)}
    lora = on_meta(lora_llama3, ["q_proj"], lora_rank=2, lora_alpha=4)
    missing, unexpected = training.load_from_full_model_state_dict(lora, dict(state), CPU)
    assert set(missing) == get_adapter_params(lora).keys()
    assert unexpected == ["exploration.weight"]
    with pytest.raises(
        RuntimeError, match=r"does not fit the model: missing \[\], unexpected \['exploration.weight'\]"
    ):
        training.load_from_full_model_state_dict(on_meta(), state, CPU, strict=True)


def test_tensor_of_another_shape_is_refused_by_name():
    state = dict(llama3(**{**NUMBERS, "vocab_size": 41}).state_dict())
    with pytest.raises(CheckpointError, match=r"'tok_embeddings.weight' has the shape \[41, 16\]"):
        training.load_from_full_model_state_dict(on_meta(), state, CPU)


def test_only_rank_zero_gathers_and_adapters_can_be_gathered_alone():
    model = lora_llama3(["q_proj"], **NUMBERS, lora_rank=2, lora_alpha=4)
    assert training.gather_cpu_state_dict(model, is_rank_zero=False) == {}
    assert training.gather_cpu_state_dict(model, True).keys() == model.state_dict().keys()
    adapter = training.gather_cpu_state_dict(model, True, adapter_weights_only=True)
    assert adapter.keys() == get_adapter_params(model).keys()


def steps(model, optimizer, count):
    for _ in range(count):
        model(torch.arange(8).view(1, -1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def groups(model):
    named = list(model.named_parameters())
    norms = [parameter for name, parameter in named if "norm" in name]
    other_parameters = [parameter for name, parameter in named if "norm" not in name]
    return [{"params": other_parameters, "lr": 1e-2}, {"params": norms, "lr": 1e-3, "weight_decay": 0.0}]


def test_an_optimizer_goes_on_from_its_full_state():
    model = llama3(**NUMBERS)
    optimizer = torch.optim.AdamW(groups(model))
    steps(model, optimizer, 2)
    again = deepcopy(model)
    state = training.get_full_optimizer_state_dict(model, optimizer, True)
    assert state["state"].keys() == dict(model.named_parameters()).keys()
    assert training.get_full_optimizer_state_dict(model, optimizer, False) == {}
    other_optimizer = torch.optim.AdamW(groups(again), lr=0.5)
    training.load_from_full_optimizer_state_dict(again, other_optimizer, state, CPU)
    assert [group["lr"] for group in other_optimizer.param_groups] == [1e-2, 1e-3]
    steps(model, optimizer, 2)
    steps(again, other_optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_state_of_other_parameters_is_refused():
    model = llama3(**NUMBERS)
    state = training.get_full_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), True)
    fewer = torch.optim.AdamW([model.norm.scale])
    with pytest.raises(CheckpointError, match="belongs to other parameters"):
        training.load_from_full_optimizer_state_dict(model, fewer, state, CPU)
    with pytest.raises(ValueError, match="a parameter that the model lacks"):
        training.get_full_optimizer_state_dict(on_meta(), fewer, True)


@pytest.mark.filterwarnings("ignore:scale_grads is deprecated:FutureWarning")
def test_gradients_are_scaled():
    model = torch.nn.Linear(2, 1, bias=False)
    model(torch.ones(1, 2)).sum().backward()
    training.scale_grads(model, torch.tensor(0.25))
    assert torch.equal(model.weight.grad, torch.full((1, 2), 0.25))


def test_a_train_context_enters_the_context_that_it_is_given():
    entered = []

    class Context:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *exception):
            entered.append(False)

    context = training.get_train_context(enable_loss_parallel=False)
    with context(Context()):
        assert entered == [True]
    with context():
        assert entered == [True, False]


def test_no_context_parallelism_changes_nothing():
    manager = training.get_context_parallel_manager(enabled=False, world_mesh=None, model=torch.nn.Identity())
    tokens = torch.arange(4).view(1, 4)
    with manager([tokens]):
        assert tokens.shape == (1, 4)


@pytest.mark.parametrize("saved_async", [False, True])
def test_the_two_kinds_of_checkpoint_do_not_resume_each_other(saved_async, tmp_path):
    from tests.tiny import write_checkpoint

    base = write_checkpoint(tmp_path / "base")
    cfg = {"device": "cpu", "enable_async_checkpointing": saved_async}
    store = FullModelHFCheckpointer(str(base), output_dir=str(tmp_path / "out"))
    from torchtune.models import from_hf_config

    model = from_hf_config(str(base))
    store.load_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    progress = TrainingProgress(seed=1, epochs_run=1, total_epochs=2, max_steps_per_epoch=None)
    CheckpointClient(cfg, store).save_checkpoint(model, optimizer, progress, epoch=0)
    store.close()
    again = FullModelHFCheckpointer(str(base), output_dir=str(tmp_path / "out"), should_load_recipe_state=saved_async)
    client = CheckpointClient({**cfg, "enable_async_checkpointing": not saved_async}, again)
    with pytest.raises(CheckpointError, match=f"resume it with enable_async_checkpointing={saved_async}"):
        client.load_base_checkpoint() if saved_async else client.load_distributed_checkpoint(model, optimizer)


def test_saving_the_adapter_of_a_model_without_one_is_refused(tmp_path):
    store = FullModelHFCheckpointer(str(tmp_path), output_dir=str(tmp_path / "out"))
    model = llama3(**NUMBERS)
    progress = TrainingProgress(seed=1, epochs_run=1, total_epochs=2, max_steps_per_epoch=None)
    with pytest.raises(CheckpointError, match="the model has no adapter"):
        CheckpointClient({"device": "cpu"}, store).save_checkpoint(model, None, progress, epoch=0, adapter_only=True)


def test_full_state_dicts_hold_adapters_of_one_rank_alone(tmp_path):
    store = FullModelHFCheckpointer(str(tmp_path), output_dir=str(tmp_path / "out"))
    progress = TrainingProgress(seed=1, epochs_run=1, total_epochs=2, max_steps_per_epoch=None)
    for options in ({"train_modules": ["norm"]}, {"rank_pattern": {"q_proj": 4}}):
        model = llama3(**NUMBERS)
        apply_conversions(model, [LoRA(rank=2, **options)])
        with pytest.raises(CheckpointError, match=r"leave out train_modules, rank_pattern.* or call save"):
            CheckpointClient({"device": "cpu"}, store).save_checkpoint(model, None, progress, epoch=0)


def test_a_classifier_has_as_many_outputs_as_classes():
    model = classifier_model(3, "torchtune.models.llama3.llama3", **NUMBERS)
    assert model(torch.arange(6).view(1, -1)).shape == (1, 6, 3)
    assert model.description.num_classes == 3
    lora = classifier_model(
        2,
        "torchtune.models.llama3.lora_llama3",
        lora_attn_modules=["q_proj"],
        apply_lora_to_output=True,
        lora_rank=2,
        lora_alpha=4,
        **NUMBERS,
    )
    assert get_adapter_params(lora)["output.lora_b.weight"].shape == (2, 2)
    with pytest.raises(UserError, match=r"there is no builder 'torchtune\.models\.llama3\.llama9'"):
        classifier_model(2, "torchtune.models.llama3.llama9")


@pytest.mark.parametrize("family", ["llama2", "mistral"])
def test_earlier_classifier_builders_warn_and_build_classifiers(family):
    import importlib

    module = importlib.import_module(f"torchtune.models.{family}")
    with pytest.warns(FutureWarning, match="classifier_model"):
        model = getattr(module, f"{family}_classifier")(2, **NUMBERS)
    assert model(torch.arange(6).view(1, -1)).shape == (1, 6, 2)
    with pytest.warns(FutureWarning, match="classifier_model"):
        lora = getattr(module, f"lora_{family}_classifier")(
            ["v_proj"], num_classes=4, lora_rank=2, lora_alpha=4, **NUMBERS
        )
    assert lora.output.weight.shape == (4, 16)
    assert get_adapter_params(lora)


def test_keys_of_earlier_configs_are_accepted(tmp_path, caplog):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from omegaconf import DictConfig\nfrom torchtune.training import PROFILER_KEY\n"
        "def main(cfg: DictConfig):\n    return cfg.get(PROFILER_KEY), cfg.lr\n"
    )
    namespace = {"__file__": str(recipe)}
    exec(compile(recipe.read_text(), str(recipe), "exec"), namespace)
    config = tmp_path / "mine.yaml"
    config.write_text("lr: 0.1\nprofiler: {enabled: False}\nfsdp: {cpu_offload: False}\nlog_level: WARN\n")
    assert load_and_check(config, (), namespace["main"]).lr == 0.1
    config.write_text("lr: 0.1\nlearning_note: high\n")
    load_and_check(config, (), namespace["main"])
    assert "mine.py never reads learning_note" in caplog.text
    config.write_text("lr: 0.1\nlrr: 0.1\n")
    with pytest.raises(UserError, match=r"lrr: is never read by mine\.py; did you mean 'lr'"):
        load_and_check(config, (), namespace["main"])


class Positions(torch.nn.Module):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, input_pos: torch.Tensor) -> Any:
        return input_pos.tolist()


def test_chunk_of_a_sequence_keeps_its_positions():
    model = Positions()
    mesh = SimpleNamespace(size=lambda: 2, get_group=lambda: None, get_local_rank=lambda: 1)
    manager = training.get_context_parallel_manager(enabled=True, world_mesh={"cp": mesh}, model=model)
    tokens = torch.arange(8).view(1, 8)
    with manager([tokens]):
        assert model(tokens) == model(tokens=tokens) == [[4, 5, 6, 7]]
    assert tokens.shape == (1, 8)
