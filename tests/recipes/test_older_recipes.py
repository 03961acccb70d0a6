"""Recipes written against earlier releases train, save and resume unchanged, and others load what they save."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from tests.recipes.killing import Forker, said
from tests.recipes.runs import read_log
from tests.tiny import write_checkpoint, write_conversations, write_pairs

OLDER = "../tests/recipes/older"
SINGLE, DISTRIBUTED = f"{OLDER}/single_device", f"{OLDER}/distributed"
LLAMA = {
    "vocab_size": 320,
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    write_checkpoint(folder / "checkpoint", tied=False)
    write_conversations(folder / "data.jsonl")
    return folder


def write_yaml(folder: Path, output_dir: Path, *, lora: bool, **settings: Any) -> Path:
    """A config in the manner of earlier releases."""
    base = json.loads((folder / "checkpoint" / "config.json").read_text())
    model = {**LLAMA, "vocab_size": base["vocab_size"]}
    cfg = {
        "output_dir": str(output_dir),
        "model": {"_component_": "torchtune.models.llama3.llama3", **model},
        "tokenizer": {
            "_component_": "torchtune.tokenizers.hf_tokenizer",
            "path": str(folder / "checkpoint"),
            "max_seq_len": 128,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder / "checkpoint"),
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": "${output_dir}",
            "model_type": "LLAMA3",
        },
        "resume_from_checkpoint": False,
        "dataset": {
            "_component_": "torchtune.datasets.chat_dataset",
            "source": "json",
            "data_files": str(folder / "data.jsonl"),
            "conversation_column": "messages",
            "conversation_style": "openai",
            "packed": False,
        },
        "seed": 7,
        "shuffle": True,
        "batch_size": 2,
        "epochs": 2,
        "max_steps_per_epoch": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
        "optimizer_in_bwd": False,
        "clip_grad_norm": 1.0,
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        "compile": False,
        "device": "cpu",
        "dtype": "fp32",
        "enable_activation_checkpointing": False,
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "log_level": "INFO",
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
            "filename": "log.jsonl",
            "output_fmt": "jsonl",
        },
        "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
    }
    if lora:
        cfg["model"] = {"_component_": "torchtune.models.llama3.lora_llama3", **LORA, **model}
        cfg["save_adapter_weights_only"] = False
        cfg["lr_scheduler"] = {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 2,
        }
    cfg |= settings
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(cfg, sort_keys=False))
    return path


def run(forker: Forker, name: str, path: Path, *overrides: str, ranks: int | None = None) -> None:
    ranks = ranks or (2 if name == DISTRIBUTED else 1)
    forker.start(name, path, *overrides, ranks=ranks)
    codes = forker.wait()
    assert codes == [0] * ranks, said(path)


def records(output_dir: Path, key: str = "loss") -> dict[int, float]:
    return {record["step"]: record[key] for record in read_log(output_dir)}


def interrupted(whole: Path, copy: Path, last: str) -> Path:
    """The output of a run that was stopped after its first checkpoint."""
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns(last, "logs"))
    return copy


def check_saved(saved: Path, base: Path, *, lora: bool, like: Path) -> None:
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
    ours, theirs = load_file(saved / "model.safetensors"), load_file(like / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


CASES = {
    "full": (SINGLE, False, {}),
    "full in backward": (
        SINGLE,
        False,
        {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None},
    ),
    "lora": (SINGLE, True, {}),
    "full on 2 ranks": (DISTRIBUTED, False, {"custom_sharded_layers": ["tok_embeddings", "output"]}),
    "full on 2 ranks asynchronously": (
        DISTRIBUTED,
        False,
        {"enable_async_checkpointing": True, "save_every_n_steps": 1, "epochs": 1},
    ),
    "full on 2 ranks in backward": (
        DISTRIBUTED,
        False,
        {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None},
    ),
    "lora on 2 ranks": (DISTRIBUTED, True, {}),
    "lora on 2 ranks asynchronously": (DISTRIBUTED, True, {"enable_async_checkpointing": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_older_recipe_trains_saves_and_resumes(case, forker, folder):
    name, lora, settings = CASES[case]
    whole = folder / case.replace(" ", "_")
    run(forker, name, write_yaml(folder, whole, lora=lora, **settings))
    losses = records(whole)
    first, last = ("step_1", "step_2") if "save_every_n_steps" in settings else ("epoch_0", "epoch_1")
    steps_saved = len(losses) // 2
    assert set(losses) == set(range(1, 2 * steps_saved + 1))

    rest = interrupted(whole, whole.with_name(whole.name + "_resumed"), last)
    assert (rest / first).is_dir()
    run(forker, name, write_yaml(folder, rest, lora=lora, **settings), "resume_from_checkpoint=True")
    assert records(rest) == {step: loss for step, loss in losses.items() if step > steps_saved}
    check_saved(rest / last, folder / "checkpoint", lora=lora, like=whole / last)


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
def alone(forker: Forker, folder: Path) -> Path:
    output_dir = folder / "alone"
    run(forker, SINGLE, write_yaml(folder, output_dir, lora=False, batch_size=4, epochs=1))
    return output_dir


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_train_as_one_process(split, alone, forker, folder):
    """Losses and gradient norms: gradients are scaled by the recipe, which expects them averaged over ranks."""
    output_dir = folder / split
    run(
        forker,
        DISTRIBUTED,
        write_yaml(folder, output_dir, lora=False, **{"batch_size": 4, "epochs": 1, **SPLITS[split]}),
    )
    for key in ("loss", "grad_norm"):
        assert records(output_dir, key) == pytest.approx(records(alone, key), rel=1e-4)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_older_quantisation_aware_training_on_two_ranks(lora, forker, folder):
    quantizer = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
    settings = {"quantizer": {"_component_": quantizer, "groupsize": 16}, "fake_quant_after_n_steps": 1}
    losses = []
    for name, options in (("plain", {}), ("quantised", {} if lora else settings)):
        options = {**options, "quantizer": settings["quantizer"]} if name == "quantised" else options
        output_dir = folder / f"{name}_{lora}"
        run(forker, DISTRIBUTED, write_yaml(folder, output_dir, lora=lora, **options))
        losses.append(records(output_dir))
        assert losses[-1][3] + losses[-1][4] < losses[-1][1] + losses[-1][2]
        assert (output_dir / "epoch_1" / "model.safetensors").is_file()
    plain, quantised = losses
    assert (plain[1] == quantised[1]) is not lora  # the first step is without quantization
    assert plain[2] != quantised[2]


def preferences(folder: Path, *, lora: bool) -> dict[str, Any]:
    """Settings of DPO, which earlier releases gave a checkpointer for the reference unless the model had an adapter."""
    pairs = folder / "pairs.jsonl"
    if not pairs.exists():
        write_pairs(pairs, 16)
    reference = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder / "checkpoint"),
        "checkpoint_files": ["model.safetensors"],
        "output_dir": "${output_dir}",
        "model_type": "LLAMA3",
    }
    return {
        "dataset": {
            "_component_": "torchtune.datasets.preference_dataset",
            "source": "json",
            "data_files": str(pairs),
        },
        "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1, "label_smoothing": 0},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        **({} if lora else {"ref_checkpointer": reference}),
    }


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_older_preferences_train_alone_and_on_two_ranks(lora, forker, folder):
    figures = []
    for ranks, batch_size in ((1, 4), (2, 2)):
        output_dir = folder / f"preferences_{lora}_{ranks}"
        settings = {**preferences(folder, lora=lora), "batch_size": batch_size}
        run(forker, f"{OLDER}/preferences", write_yaml(folder, output_dir, lora=lora, **settings), ranks=ranks)
        losses = records(output_dir)
        assert losses[1] == pytest.approx(math.log(2), abs=1e-6)
        assert losses[3] + losses[4] < losses[1] + losses[2]
        assert (output_dir / "epoch_1" / "model.safetensors").is_file()
        figures.append({step: losses[step] for step in ((1,) if lora else losses)})  # ranks draw other adapters
        figures[-1] |= {-step: value for step, value in records(output_dir, "log_probs/chosen").items() if step == 1}
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)


def test_older_ppo_trains_policy_and_value_model(forker, folder):
    base, reward, output_dir = folder / "checkpoint", folder / "reward", folder / "ppo"
    write_checkpoint(reward, seed=3, is_reward=True)
    model = {**LLAMA, "vocab_size": json.loads((base / "config.json").read_text())["vocab_size"]}
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"text": f"the {word} sees"}) + "\n" for word in "cat dog bird one".split() * 2)
    )
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_files": ["model.safetensors"],
        "output_dir": "${output_dir}/policy",
    }
    of_policy = {**checkpointer, "checkpoint_dir": str(base), "model_type": "LLAMA3"}
    of_reward = {**checkpointer, "checkpoint_dir": str(reward), "model_type": "REWARD"}
    settings = {
        "policy_model": {"_component_": "torchtune.models.llama3.llama3", **model},
        "reward_and_value_model": {
            "_component_": "torchtune.modules.classifier_model",
            "num_classes": 1,
            "base_model_path": "torchtune.models.llama3.llama3",
            **model,
        },
        "checkpointer": of_policy,
        "ref_policy_checkpointer": of_policy,
        "value_checkpointer": {**of_reward, "output_dir": "${output_dir}/value"},
        "reward_checkpointer": of_reward,
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": str(prompts),
            "column": "text",
            "add_eos": False,
        },
        "loss": {
            "_component_": "torchtune.rlhf.loss.PPOLoss",
            "epsilon": 0.2,
            "value_clip_range": 10.0,
            "value_coeff": 1.0,
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-3},
        "batch_size": 4,
        "forward_batch_size": 2,
        "ppo_batch_size": 4,
        "ppo_epochs": 1,
        "gradient_accumulation_steps": 2,
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
        "enable_kv_cache": True,
    }
    path = write_yaml(folder, output_dir, lora=False, **settings)
    cfg = yaml.safe_load(path.read_text())
    for key in ("model", "epochs", "max_steps_per_epoch", "clip_grad_norm"):
        del cfg[key]
    path.write_text(yaml.safe_dump(cfg, sort_keys=False))
    run(forker, f"{OLDER}/ppo", path)
    value_losses, ratios = list(records(output_dir, "value_loss").values()), records(output_dir, "ratios")
    assert len(ratios) == 8
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1), abs=1e-3)  # one update on what this policy sampled
    assert sum(value_losses[-2:]) < sum(value_losses[:2])
    for name, kind in (("policy", "AutoModelForCausalLM"), ("value", "AutoModelForSequenceClassification")):
        saved = sorted((output_dir / name).glob("epoch_*"))[-1]
        getattr(transformers, kind).from_pretrained(saved)
