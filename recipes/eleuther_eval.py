"""Evaluate a model on tasks of lm-eval (extra ``eval``): log-likelihoods, generated answers, perplexity.

Tasks are from lm-eval, from ``include_path``, or one of three that need no download: tune_facts, tune_arithmetic and
tune_texts.

    tune run eleuther_eval --config eleuther_evaluation tasks=[truthfulqa_mc2,hellaswag] limit=100
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch

from torchtune import config, estimate, evaluation, training, utils
from torchtune.config import Component, Range
from torchtune.models import from_hf_config, stored_dtype
from torchtune.modules.conversion import apply_conversions
from torchtune.tokenizers import hf_tokenizer


@dataclass(kw_only=True)
class Settings:
    """Settings of an evaluation."""

    # Builder of the model, for example torchtune.models.llama3_2.llama3_2_1b; null: by the checkpoint's config.json.
    model: Component | None = None
    # Conversions of the model (adapters, quantization …), applied in order before the weights are loaded.
    model_converters: list[Component] = field(default_factory=list)
    # Tokenizer of the model, with its chat template; null: the tokenizer in the checkpoint's folder.
    tokenizer: Component | None = None
    # Checkpointer: source of the weights.
    checkpointer: Component

    # Names of tasks, groups or tags of lm-eval.
    tasks: list[str]
    # Folder with custom tasks, in lm-eval's YAML format.
    include_path: str | None = None
    # Maximum number of examples per task; null: all.
    limit: Annotated[int | None, Range(min=1)] = None
    # Sequences per forward pass, and answers generated at the same time.
    batch_size: Annotated[int, Range(min=1)] = 8
    # Maximum sequence length in tokens; longer sequences are truncated on the left. null: the model's context.
    max_seq_length: Annotated[int | None, Range(min=2)] = None
    # Use the checkpoint's chat template, with few-shot examples as earlier turns.
    chat_template: bool = False
    # Generate with a KV cache.
    enable_kv_cache: bool = True
    # Folder of results.json and a cache of answers, from which an interrupted run resumes; null: nothing is written.
    output_dir: str | None = None
    # Seed of few-shot examples and of sampling.
    seed: Annotated[int | None, Range(min=0)] = 1234

    # Device to run on: cuda, cpu, mps …; null: the best one.
    device: str | None = None
    # Dtype of weights and activations; null: the best one that the device computes fast.
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    # Argument of torch.set_deterministic_debug_mode.
    cudnn_deterministic_mode: int | str | None = None
    # Log level of the terminal.
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "INFO"

    retired: ClassVar[dict[str, str]] = {
        "apply_chat_template": "set chat_template",
        "quantizer": "the checkpoint decides how weights are stored",
        "resume_from_checkpoint": "an interrupted run goes on if output_dir is set",
    }

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (setting, error and remedy) for invalid combinations of settings."""
        for name in ("model", "tokenizer"):
            if getattr(self, name) is None and "checkpoint_dir" not in self.checkpointer:
                yield name, "is not given, and checkpointer has no checkpoint_dir to take it from: give one of them"
        if not self.tasks:
            yield "tasks", "is empty: name a task, for example tune_facts"


class EleutherEvalRecipe:
    """Evaluation of one model."""

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self.log = utils.get_logger(cfg.log_level)
        self.device = utils.get_device(cfg.device)
        stored = stored_dtype(cfg.checkpointer.get("checkpoint_dir"))
        cfg.dtype, self.dtype = training.choose_dtype(cfg.dtype, self.device, stored)
        self.seed = training.set_seed(cfg.seed, debug_mode=cfg.cudnn_deterministic_mode)

    def setup(self, cfg: Settings) -> None:
        """Find the tasks, then load tokenizer and model."""
        self.tasks = evaluation.find_tasks(cfg.tasks, cfg.include_path)
        folder = cfg.checkpointer.get("checkpoint_dir")
        self.tokenizer = config.instantiate(cfg.tokenizer)
        if self.tokenizer is None:
            self.tokenizer = hf_tokenizer(folder)
        checkpointer = config.instantiate(cfg.checkpointer)
        with training.set_default_dtype(self.dtype), torch.device("meta"):
            self.model = config.instantiate(cfg.model)
            if self.model is None:
                self.model = from_hf_config(folder)
            apply_conversions(self.model, [config.instantiate(converter) for converter in cfg.model_converters])
        training.fit_vocabulary(self.model, self.tokenizer)
        checkpointer.load_model(self.model, device=self.device)

    def evaluate(self, cfg: Settings) -> dict[str, Any]:
        """Evaluate, print the table, and return the results of each task."""
        results = evaluation.evaluate_tasks(
            self.model,
            self.tokenizer,
            self.tasks,
            batch_size=cfg.batch_size,
            max_length=cfg.max_seq_length,
            enable_kv_cache=cfg.enable_kv_cache,
            limit=cfg.limit,
            chat_template=cfg.chat_template,
            seed=self.seed,
            folder=cfg.output_dir,
        )
        print(results.table)
        for name, value in training.get_memory_stats(self.device).items():
            self.log.info(f"{name}: {value:.2f} GiB")
        return results.by_task


@config.parse
def recipe_main(cfg: Settings) -> Any:
    """Run the recipe with checked settings."""
    estimate.check_run(cfg)
    recipe = EleutherEvalRecipe(cfg)
    recipe.setup(cfg)
    recipe.evaluate(cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
