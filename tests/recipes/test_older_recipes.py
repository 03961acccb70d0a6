"""Recipes written against earlier releases train, save and resume unchanged, and others load what they save."""

import json
import math
import shutil

import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from tests.recipes.killing import said
from tests.recipes.runs import read_log, write_config
from tests.tiny import write_checkpoint, write_conversations, write_lines, write_pairs

FINETUNE = "../tests/recipes/older/finetune"
LLAMA = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": 4096,
    "rope_base": 10_000,
    "norm_eps": 1e-6,
}
LORA = {
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "lora_rank": 4,
    "lora_alpha": 8,
}
SETTINGS = {
    "resume_from_checkpoint": False,
    "shuffle": True,
    "epochs": 2,
    "max_steps_per_epoch": 2,
    "gradient_accumulation_steps": 2,
    "optimizer_in_bwd": False,
    "clip_grad_norm": 1.0,
    "compile": False,
    "enable_activation_checkpointing": True,
    "log_every_n_steps": 1,
    "log_peak_memory_stats": True,
    "log_level": "INFO",
    "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("older")
    write_checkpoint(folder / "checkpoint", tied=False)
    write_conversations(folder / "data.jsonl")
    write_pairs(folder / "pairs.jsonl", 16)
    return folder


def sizes(folder):
    return {**LLAMA, "vocab_size": json.loads((folder / "checkpoint" / "config.json").read_text())["vocab_size"]}


def write_yaml(folder, output_dir, *, lora=False, method="full_finetune_single_device", **settings):
    """A config in the manner of earlier releases."""
    path = write_config(method, folder, output_dir)
    cfg = yaml.safe_load(path.read_text()) | SETTINGS
    del cfg["recipe"]
    for name in [name for name in cfg if name.endswith("checkpointer")]:
        kind = "REWARD" if name in ("reward_checkpointer", "value_checkpointer") else "LLAMA3"
        cfg[name] |= {"checkpoint_files": ["model.safetensors"], "output_dir": "${output_dir}", "model_type": kind}
    cfg["model"] = {"_component_": "torchtune.models.llama3.llama3", **sizes(folder)}
    if lora:
        cfg["model"] |= {"_component_": "torchtune.models.llama3.lora_llama3", **LORA}
    cfg |= {"lr_scheduler": None} if settings.get("optimizer_in_bwd") else {}
    path.write_text(yaml.safe_dump(cfg | settings, sort_keys=False))
    return path


def run(forker, path, *overrides, ranks=1, recipe=FINETUNE):
    forker.start(recipe, path, *overrides, ranks=ranks)
    assert forker.wait() == [0] * ranks, said(path)


def records(output_dir, key="loss"):
    return {record["step"]: record[key] for record in read_log(output_dir)}


def check_saved(saved, base, *, lora, like):
    """The last checkpoint loads in transformers and peft, is trained, and equals that of another run to the bit."""
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    before = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    row = json.loads((base.parent / "data.jsonl").read_text().splitlines()[0])
    text = transformers.AutoTokenizer.from_pretrained(saved).apply_chat_template(row["messages"], tokenize=False)
    tokens = transformers.AutoTokenizer.from_pretrained(saved)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(tokens).logits
        assert model(tokens, labels=tokens).loss < before(tokens, labels=tokens).loss - 0.01
        if lora:
            adapted = peft.PeftModel.from_pretrained(before, saved / "adapter").eval()
            torch.testing.assert_close(adapted(tokens).logits, logits, atol=1e-4, rtol=1e-4)
    saved_weights, earlier_weights = load_file(saved / "model.safetensors"), load_file(like / "model.safetensors")
    assert saved_weights.keys() == earlier_weights.keys()
    assert all(torch.equal(saved_weights[name], earlier_weights[name]) for name in saved_weights)


IN_BACKWARD = {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None}
# Ranks, whether with LoRA, settings.
CASES = {
    "full": (1, False, {}),
    "full in backward": (1, False, IN_BACKWARD),
    "lora": (1, True, {}),
    "full on 2 ranks": (2, False, {"custom_sharded_layers": ["tok_embeddings", "output"]}),
    "full on 2 ranks asynchronously": (
        2,
        False,
        {"enable_async_checkpointing": True, "save_every_n_steps": 1, "epochs": 1},
    ),
    "full on 2 ranks in backward": (2, False, IN_BACKWARD),
    "lora on 2 ranks": (2, True, {}),
    "lora on 2 ranks asynchronously": (2, True, {"enable_async_checkpointing": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_older_recipe_trains_saves_and_resumes(case, forker, folder):
    ranks, lora, settings = CASES[case]
    output = folder / case.replace(" ", "_")
    run(forker, write_yaml(folder, output, lora=lora, **settings), ranks=ranks)
    losses = records(output)
    first, last = ("step_1", "step_2") if "save_every_n_steps" in settings else ("epoch_0", "epoch_1")
    steps_saved = len(losses) // 2
    assert set(losses) == set(range(1, 2 * steps_saved + 1))

    resumed_output = output.with_name(output.name + "_resumed")  # of a run that was stopped after its first checkpoint
    shutil.copytree(output, resumed_output, ignore=shutil.ignore_patterns(last, "logs"))
    assert (resumed_output / first).is_dir()
    run(forker, write_yaml(folder, resumed_output, lora=lora, **settings), "resume_from_checkpoint=True", ranks=ranks)
    assert records(resumed_output) == {step: loss for step, loss in losses.items() if step > steps_saved}
    check_saved(resumed_output / last, folder / "checkpoint", lora=lora, like=output / last)


SPLITS = {
    "data": {"batch_size": 2},
    "sequences": {"context_parallel_dim": 2, "data_parallel_shard_dim": 1},
    "layers": {
        "tensor_parallel_dim": 2,
        "data_parallel_shard_dim": 1,
        "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
    },
}


@pytest.fixture(scope="module")
def alone(forker, folder):
    run(forker, write_yaml(folder, folder / "alone", batch_size=4, epochs=1))
    return folder / "alone"


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_train_as_one_process(split, alone, forker, folder):
    """Losses and gradient norms: gradients are scaled by the recipe, which expects them averaged over ranks."""
    run(forker, write_yaml(folder, folder / split, **{"batch_size": 4, "epochs": 1, **SPLITS[split]}), ranks=2)
    for key in ("loss", "grad_norm"):
        assert records(folder / split, key) == pytest.approx(records(alone, key), rel=1e-4)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_older_quantisation_aware_training_on_two_ranks(lora, forker, folder):
    component = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
    quantizer = {"quantizer": {"_component_": component, "groupsize": 16}}
    losses = []
    for name, options in (
        ("plain", {}),
        ("quantised", quantizer if lora else {**quantizer, "fake_quant_after_n_steps": 1}),
    ):
        output_dir = folder / f"{name}_{lora}"
        run(forker, write_yaml(folder, output_dir, lora=lora, **options), ranks=2)
        losses.append(records(output_dir))
        assert losses[-1][3] + losses[-1][4] < losses[-1][1] + losses[-1][2]
        assert (output_dir / "epoch_1" / "model.safetensors").is_file()
    plain, quantised = losses
    assert (plain[1] == quantised[1]) is not lora  # the first step is without quantization
    assert plain[2] != quantised[2]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_older_preferences_train_alone_and_on_two_ranks(lora, forker, folder):
    figures = []
    for ranks, batch_size in ((1, 4), (2, 2)):
        output_dir = folder / f"preferences_{lora}_{ranks}"
        path = write_yaml(folder, output_dir, lora=lora, method="full_dpo_single_device", batch_size=batch_size)
        cfg = yaml.safe_load(path.read_text())
        cfg["loss"] |= {"beta": 0.1, "label_smoothing": 0}
        cfg |= {} if lora else {"ref_checkpointer": cfg["checkpointer"]}
        path.write_text(yaml.safe_dump(cfg))
        run(forker, path, ranks=ranks)
        losses = records(output_dir)
        assert losses[1] == pytest.approx(math.log(2), abs=1e-6)
        assert losses[3] + losses[4] < losses[1] + losses[2]
        assert (output_dir / "epoch_1" / "model.safetensors").is_file()
        compared_steps = [1] if lora else losses  # ranks draw other adapters
        figures.append({step: losses[step] for step in compared_steps})
        figures[-1]["log_probs/chosen"] = records(output_dir, "log_probs/chosen")[1]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)


def test_older_ppo_trains_policy_and_value_model(forker, folder):
    output_dir = folder / "ppo"
    prompts = write_lines(
        folder / "prompts.jsonl", [{"text": f"the {word} sees"} for word in "cat dog bird one".split() * 2]
    )
    settings = {
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": str(prompts),
            "column": "text",
            "add_eos": False,
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-3},
        "batch_size": 4,
        "forward_batch_size": 2,
        "ppo_batch_size": 4,
        "ppo_epochs": 1,
        "num_steps": 32,
        "max_generated_tokens": 6,
        "min_response_length": 2,
        "penalise_no_eos": False,
        "reward_penalty": -3,
        "temperature": 0.7,
        "top_k": None,
        "gamma": 1,
        "lmbda": 0.95,
        "kl_coeff": 0.01,
        "whiten_rewards": False,
    }
    path = write_yaml(folder, output_dir, method="ppo_full_finetune_single_device", **settings)
    cfg = yaml.safe_load(path.read_text())
    cfg["policy_model"] = cfg.pop("model")
    base = {"base_model_path": "torchtune.models.llama3.llama3", **sizes(folder)}
    del cfg["reward_and_value_model"]["checkpoint_dir"]
    cfg["reward_and_value_model"] |= base
    cfg["loss"] |= {"epsilon": 0.2, "value_clip_range": 10.0, "value_coeff": 1.0}
    for name in ("checkpointer", "value_checkpointer"):
        cfg[name]["output_dir"] = f"{output_dir}/{name}"
    for key in (
        "epochs",
        "max_steps_per_epoch",
        "clip_grad_norm",
        "enable_activation_checkpointing",
        "log_peak_memory_stats",
        "lr_scheduler",
    ):
        del cfg[key]
    path.write_text(yaml.safe_dump(cfg, sort_keys=False))
    run(forker, path, recipe=FINETUNE.replace("finetune", "ppo"))
    value_losses = list(records(output_dir, "value_loss").values())
    ratios = records(output_dir, "ratios")
    assert len(ratios) == 8
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1), abs=1e-3)  # one update on what this policy sampled
    assert sum(value_losses[-2:]) < sum(value_losses[:2])
    for name, kind in (
        ("checkpointer", "AutoModelForCausalLM"),
        ("value_checkpointer", "AutoModelForSequenceClassification"),
    ):
        saved = sorted((output_dir / name).glob("epoch_*"))[-1]
        getattr(transformers, kind).from_pretrained(saved)
