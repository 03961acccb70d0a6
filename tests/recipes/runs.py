"""Run a recipe inside the test process, whole or changed, and look at what it did."""

import importlib.util
import itertools
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

from tests.devices import DEVICE
from tests.tiny import CHATS, read_lines, write_checkpoint, write_conversations, write_pairs
from tools.recipe_table import recipes_in
from torchtune._recipe_registry import current_name, promises
from torchtune.config import load_and_check

RECIPES = Path(__file__).parents[2] / "recipes"
# Recipes of fine-tuning, as recipes/features.yaml says: the whole contract suite runs on all of them.
TRAINING = recipes_in("training", "supervised")
WEIGHTS = [name for name in TRAINING if name in recipes_in("weights")]
ADAPTERS = [name for name in TRAINING if name in recipes_in("adapters")]
# A recipe that trains all weights or adapters is run under the names of earlier releases, which say what it trains.
PREFERENCE = ["full_dpo_distributed", "lora_dpo_single_device"]
# They simulate a quantized model: their losses are not those of plain torch, so test_qat.py runs them.
QAT = ["qat_single_device", "qat_distributed", "qat_lora_finetune_single_device", "qat_lora_finetune_distributed"]
# More than the tokenizer has: embeddings are padded.
TEACHER_VOCABULARY = 384
# The last line of a step before it validates and saves; what is put after it is done after each step.
ADVANCE = "                progress.advance(self.global_step)\n"
_count = itertools.count()


def after_each_step(code: str) -> dict[str, str]:
    """The change of a recipe that does ``code`` after each step, before it saves; lines after the first keep theirs."""
    return {ADVANCE: f"{ADVANCE}{' ' * 16}{code}\n"}


def load_recipe(name: str, folder: Path, changes: dict[str, str] | None = None) -> ModuleType:
    """Import a recipe from its file; ``changes`` (old text -> new text) change a copy of it first."""
    path = RECIPES / f"{current_name(name)}.py"
    if changes:
        text = path.read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, f"'{old}' stands {text.count(old)} times in {path.name}, not once"
            text = text.replace(old, new)
        path = folder / f"{next(_count)}_{name}_changed.py"  # another one each time: bytecode is kept by name
        path.write_text(text)
    module_name = f"{name}_{next(_count)}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def write_config(name: str, folder: Path, output_dir: Path, **settings: Any) -> Path:
    """Write the YAML of a short run of ``name`` on the tiny checkpoint and data in ``folder``."""
    checkpoint = folder / "checkpoint"
    data = folder / "data.jsonl"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
        write_conversations(data)
    cfg = {
        "recipe": name,
        "output_dir": str(output_dir),
        "model": {"_component_": "torchtune.models.from_hf_config", "checkpoint_dir": str(checkpoint)},
        "tokenizer": {
            "_component_": "torchtune.tokenizers.hf_tokenizer",
            "path": str(checkpoint),
            "max_seq_len": 128,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(checkpoint),
            "output_dir": "${output_dir}",
        },
        "dataset": {**CHATS, "source": "json", "data_files": str(data)},
        "seed": 7,
        "batch_size": 2,
        "epochs": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 2,
        },
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
            "output_fmt": "jsonl",
            "filename": "log.jsonl",
        },
        "device": DEVICE,
        "dtype": "fp32",
        "log_level": "ERROR",
    }
    method = current_name(name)
    if method == "dpo":
        pairs = folder / "pairs.jsonl"
        if not pairs.exists():
            write_pairs(pairs)
        cfg["dataset"] = {
            "_component_": "torchtune.datasets.preference_dataset",
            "source": "json",
            "data_files": str(pairs),
        }
        cfg["loss"] = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
    if method in ("grpo", "ppo"):
        cfg["dataset"] = {
            "_component_": "torchtune.datasets.prompt_dataset",
            "source": "json",
            "data_files": str(data),
            "column": "messages",
        }
        cfg["loss"] = {"_component_": "torchtune.rlhf.loss.GRPOLoss"}
        cfg["sampler"] = {"_component_": "torchtune.rlhf.LocalSampler", "max_new_tokens": 8}
        reward = {"_component_": "torchtune.rlhf.reward_functions.LengthReward", "target": 0, "limit": 40}
        cfg |= {"rewards": [reward], "num_samples": 4}
    if method == "ppo":
        if not (reward := folder / "reward").exists():
            write_checkpoint(reward, seed=3, is_reward=True)
        cfg["policy_model"] = cfg.pop("model")
        cfg["reward_and_value_model"] = {
            "_component_": "torchtune.modules.classifier_model",
            "num_classes": 1,
            "base_model_path": "torchtune.models.from_hf_config",
            "checkpoint_dir": str(checkpoint),
        }
        source = {name: value for name, value in cfg["checkpointer"].items() if name != "output_dir"}
        cfg["ref_policy_checkpointer"] = source
        cfg["value_checkpointer"] = cfg["reward_checkpointer"] = {**source, "checkpoint_dir": str(reward)}
        cfg["loss"] = {"_component_": "torchtune.rlhf.loss.PPOLoss"}
        cfg["max_generated_tokens"] = 8
        for key in ("sampler", "rewards", "num_samples"):
            del cfg[key]
    if method == "knowledge_distillation":
        if not (teacher := folder / "teacher").exists():
            write_checkpoint(teacher, seed=1, width=48, vocab_size=TEACHER_VOCABULARY, tied=False)
        cfg["teacher_model"] = {"_component_": "torchtune.models.from_hf_config", "checkpoint_dir": str(teacher)}
        cfg["teacher_checkpointer"] = {**cfg["checkpointer"], "checkpoint_dir": str(teacher)}
        cfg["kd_loss"] = {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"}
    if "adapters" in promises(name):
        cfg["model_converters"] = [
            {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "apply_to_mlp": True}
        ]
    if "quantizer" in promises(name):
        cfg["quantizer"] = {
            "_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer",
            "groupsize": 16,
        }
    for key, value in settings.items():
        section, _, leaf = key.partition("__")
        if leaf:
            cfg[section][leaf] = value
        else:
            cfg[section] = value
    path = folder / f"{name}_{next(_count)}.yaml"
    path.write_text(yaml.safe_dump(cfg, sort_keys=False))
    return path


def read_log(output_dir: Path) -> list[dict[str, float]]:
    """Records of the metric log, in the order in which they were written."""
    return read_lines(output_dir / "logs" / "log.jsonl")


@dataclass
class Run:
    """A finished run: its recipe object, its log, where it wrote and what it said in a process of its own."""

    recipe: Any
    output_dir: Path
    said: str = ""

    @property
    def records(self) -> list[dict[str, float]]:
        """Everything logged, in order."""
        return read_log(self.output_dir)

    @property
    def losses(self) -> dict[int, float]:
        """Step -> loss, the last one logged for a step."""
        return {record["step"]: record["loss"] for record in self.records if "loss" in record}

    def figure(self, name: str) -> list[float]:
        """The values that were logged under a name."""
        return [record[name] for record in self.records if name in record]

    def lines(self, name: str = "rollouts.jsonl") -> list[dict[str, Any]]:
        """The rows of a file of the output folder."""
        return read_lines(self.output_dir / name)

    @property
    def lrs(self) -> dict[int, float]:
        """Step -> learning rate."""
        return {record["step"]: record["lr"] for record in self.records if "lr" in record}

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """The trained parameters."""
        names = (
            (name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""), parameter)
            for name, parameter in self.recipe.model.named_parameters()
        )
        return {name: parameter.detach().clone() for name, parameter in names if parameter.requires_grad}


def class_of(module: ModuleType) -> type:
    """The recipe class of a recipe module."""
    (cls,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and value.__name__ != "Settings"
    ]
    return cls


def set_up(
    name: str, folder: Path, config: Path, *overrides: str, changes: dict[str, str] | None = None
) -> tuple[Any, Any]:
    """A recipe after its ``setup``, and its settings."""
    module = load_recipe(name, folder, changes)
    cfg = load_and_check(config, overrides, module.recipe_main)
    recipe = class_of(module)(cfg)
    recipe.setup(cfg)
    return recipe, cfg


def set_up_on(checkpoint: Path, name: str, folder: Path, **settings: Any) -> tuple[Any, Any]:
    """A recipe that does not train, after its ``setup``, and its settings."""
    source = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(checkpoint)}
    cfg = {"checkpointer": source, "device": DEVICE, "dtype": "fp32", "log_level": "ERROR", **settings}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(cfg))
    return set_up(name, folder, path)


def start(
    name: str, folder: Path, *, changes: dict[str, str] | None = None, train: bool = True, **settings: Any
) -> Run:
    """Set up a run in a new output folder (or ``settings['output_dir']``) and, with ``train``, finish it."""
    output_dir = Path(settings.pop("output_dir", folder / f"output_{next(_count)}"))
    recipe, _ = set_up(name, folder, write_config(name, folder, output_dir, **settings), changes=changes)
    try:
        if train:
            recipe.train()
    finally:
        recipe.cleanup()
    return Run(recipe, output_dir)


def run_main(name: str, folder: Path, changes: dict[str, str] | None = None, **settings: Any) -> tuple[int, Path]:
    """Run a recipe by its ``recipe_main``; returns its exit code and where it wrote."""
    module = load_recipe(name, folder, changes)
    output_dir = folder / f"run_{next(_count)}"
    config = write_config(name, folder, output_dir, **settings)
    return module.recipe_main(load_and_check(config, [], module.recipe_main)), output_dir


def resume(
    name: str, folder: Path, full_run: Run, step: int, kept: dict[str, str] | None = None, **settings: Any
) -> Run:
    """Resume a copy of a run that ended after ``step``: the rest must be the same, bit for bit.

    Args:
        name: the recipe.
        folder: holds its inputs.
        whole: the run that was not interrupted.
        step: that of the checkpoint.
        kept: name -> text of other files of the interrupted run.
        **settings: of the config.
    """
    output_dir = folder / f"resumed_{next(_count)}"
    shutil.copytree(full_run.output_dir / f"step_{step}", output_dir / f"step_{step}")
    (output_dir / "logs").mkdir()
    for file, text in (kept or {}).items():
        (output_dir / file).write_text(text)
    resumed = start(name, folder, **settings, output_dir=output_dir, resume_from_checkpoint=True)
    for figure in ("losses", "lrs"):
        remaining = {at: value for at, value in getattr(full_run, figure).items() if at > step}
        assert getattr(resumed, figure) == remaining, f"{figure} go on after step {step}"
    for key, value in full_run.trained.items():
        assert torch.equal(value, resumed.trained[key]), f"after step {step}, {key} is trained to the same bits"
    return resumed
