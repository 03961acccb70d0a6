"""Generate text with a model: a streamed answer to one prompt, or answers to a file of prompts.

By default, model and tokenizer are read from the checkpoint's folder. Several processes share the model: no device has
all of its weights.

    tune run generate --config generation prompt.user="Why is the sky blue?"
    tune run generate --config generation prompts=questions.jsonl output=answers.jsonl
    tune run --nproc-per-node 8 generate --config generation prompts=questions.jsonl
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch

from torchtune import config, estimate, generation, supervision, training, utils
from torchtune.config import Component, Range
from torchtune.data import Message
from torchtune.models import checkpoint_tokenizer, from_hf_config, stored_dtype
from torchtune.modules.conversion import apply_conversions
from torchtune.tokenizers import StreamDecoder
from torchtune.training.parallel import shard_for_inference


@dataclass(kw_only=True)
class Settings:
    """Settings of text generation."""

    # Builder of the model, for example torchtune.models.llama3_2.llama3_2_1b; null: by the checkpoint's config.json.
    model: Component | None = None
    # Conversions of the model (adapters, quantization …), applied in order before the weights are loaded.
    model_converters: list[Component] = field(default_factory=list)
    # Tokenizer of the model, with its chat template; null: the tokenizer in the checkpoint's folder.
    tokenizer: Component | None = None
    # Checkpointer: source of the weights.
    checkpointer: Component

    # Prompt: texts under user and, optionally, system; image is the path of an image for vision models.
    prompt: dict[str, str | dict[str, str | None] | None] = field(default_factory=dict)
    # JSONL file of prompts to answer instead of prompt.user. Each line is a text, a list of messages, or an object with
    # one of them under prompt or messages, and optionally image or images. prompt.system is the default system turn.
    prompts: str | None = None
    # JSONL file of the answers; null: NAME.answers.jsonl in the folder of prompts. An interrupted run resumes from it.
    output: str | None = None
    # Number of prompts of the file that are answered at the same time, with continuous batching.
    max_sequences: Annotated[int, Range(min=1)] = 16
    # Maximum length of an answer in tokens.
    max_new_tokens: Annotated[int, Range(min=1)] = 300
    # Sampling temperature; 0 is greedy.
    temperature: Annotated[float, Range(min=0)] = 0.6
    # Sample from the k most likely tokens; null or 0: from all.
    top_k: Annotated[int | None, Range(min=0)] = None
    # Sample from the most likely tokens whose probabilities sum to p; null or 1: from all.
    top_p: Annotated[float | None, Range(min=0, max=1)] = None
    # Sample from tokens that are at least p times as likely as the most likely one; null or 0: from all.
    min_p: Annotated[float | None, Range(min=0, max=1)] = None
    # Builders of functions (tokens [b, s], logits [b, v]) -> logits [b, v], which change the logits before temperature.
    logits_processors: list[Component] = field(default_factory=list)
    # Generate with a KV cache.
    enable_kv_cache: bool = True
    # Seed of sampling.
    seed: Annotated[int | None, Range(min=0)] = None

    # Device to run on: cuda, cpu, mps …; null: the best one.
    device: str | None = None
    # Dtype of weights and activations; null: the best one that the device computes fast.
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    # Watchdog timeout: minutes without progress after which the run ends and names the stalled rank; null: none.
    hang_timeout_minutes: Annotated[float | None, Range(above=0)] = 30.0
    # Argument of torch.set_deterministic_debug_mode.
    cudnn_deterministic_mode: int | str | None = None
    # Log level of the terminal.
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "INFO"

    retired: ClassVar[dict[str, str]] = {
        "output_dir": "nothing is written",
        "quantizer": "the checkpoint decides how weights are stored",
    }

    def __post_init__(self) -> None:
        # Configs of earlier releases have image and text inside prompt.user.
        content = self.prompt.get("user")
        if isinstance(content, dict):
            self.prompt = {**self.prompt, "user": None}
            for kind, value in content.items():
                key = "user" if kind == "text" else kind
                self.prompt[key] = value

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (setting, error and remedy) for invalid combinations of settings."""
        for role, text in self.prompt.items():
            if role not in ("system", "user", "image"):
                yield f"prompt.{role}", "is not a role: use system and user, and image"
            elif isinstance(text, dict):
                yield f"prompt.{role}", "must be a text"
        for name in ("model", "tokenizer"):
            if getattr(self, name) is None and "checkpoint_dir" not in self.checkpointer:
                yield name, "is not given, and checkpointer has no checkpoint_dir to take it from: give one of them"
        if not self.prompt.get("user") and not self.prompts:
            yield "prompt.user", "is empty: give the text to answer, or a file in prompts"
        if self.prompt.get("image") and self.prompts:
            yield "prompt.image", "goes with prompt.user, not with a file of prompts: leave one of them out"
        if self.output and not self.prompts:
            yield "output", "is for the answers to a file: give it in prompts"
        if self.prompts and not self.enable_kv_cache:
            yield "enable_kv_cache", "is false: files are answered with caches, set it to true"


class InferenceRecipe:
    """Answers to one prompt or a file of prompts."""

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self.log = utils.get_logger(cfg.log_level)
        self.device = utils.get_device(cfg.device)
        stored = stored_dtype(cfg.checkpointer.get("checkpoint_dir"))
        cfg.dtype, self.dtype = training.choose_dtype(cfg.dtype, self.device, stored)

    def setup(self, cfg: Settings) -> None:
        """Read the prompts, then load tokenizer and model."""
        self.prompts = []
        if cfg.prompts:
            self.prompts = generation.read_prompts(cfg.prompts, cfg.prompt.get("system"))
        folder = cfg.checkpointer.get("checkpoint_dir")
        checkpointer = config.instantiate(cfg.checkpointer)
        has_images = bool(cfg.prompt.get("image")) or any(prompt.has_images for prompt in self.prompts)
        with training.set_default_dtype(self.dtype), torch.device("meta"):
            self.model = config.instantiate(cfg.model) or from_hf_config(folder, images=has_images)
            apply_conversions(self.model, [config.instantiate(converter) for converter in cfg.model_converters])
        self.tokenizer = config.instantiate(cfg.tokenizer) or checkpoint_tokenizer(self.model, folder)
        training.fit_vocabulary(self.model, self.tokenizer)
        generation.check_generates(self.model)
        self.dims = shard_for_inference(self.model, self.device)
        # All ranks draw the same tokens. Without a seed, they agree on one.
        torch.manual_seed(training.set_seed(cfg.seed, debug_mode=cfg.cudnn_deterministic_mode))
        checkpointer.load_model(self.model, device=self.device)
        self.logits_processors = [config.instantiate(processor) for processor in cfg.logits_processors]

    def prompt_row(self, prompt: dict[str, str | None]) -> dict[str, Any]:
        """Return the token ids of the prompt, with the header of the assistant's turn, and its image."""
        messages = [Message(role=role, content=prompt[role]) for role in ("system", "user") if prompt.get(role)]
        if prompt.get("image"):
            messages[-1].content.insert(0, {"type": "image", "content": prompt["image"]})
        return generation.prompt_row(self.tokenizer, messages, "prompt")

    @utils.doing("generating")
    @torch.inference_mode()
    def generate(self, cfg: Settings) -> str:
        """Print the answer as it is generated and return it."""
        row = self.prompt_row(cfg.prompt)
        tokens = row["tokens"]
        limit = generation.answer_limit(self.model, tokens, cfg.max_new_tokens, "prompt")
        started = time.perf_counter()
        pieces: list[str] = []
        decoder = StreamDecoder(self.tokenizer)
        for token in generation.stream(
            self.model,
            torch.tensor(tokens, device=self.device),
            max_generated_tokens=limit,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            min_p=cfg.min_p,
            logits_processors=self.logits_processors,
            stop_tokens=self.tokenizer.stop_tokens,
            use_cache=cfg.enable_kv_cache,
            **generation.images_of_row(row, self.device),
        ):
            pieces.append(decoder.put(token))
            if self.dims.is_main:
                print(pieces[-1], end="", flush=True)
        last_piece = decoder.end()
        if self.dims.is_main:
            print(last_piece)
        seconds = time.perf_counter() - started
        utils.log_rank_zero(self.log, f"{len(pieces)} tokens in {seconds:.2f} s, {len(pieces) / seconds:.1f} tokens/s.")
        if len(pieces) == limit:
            reason = "max_new_tokens" if limit == cfg.max_new_tokens else "context"
            utils.log_rank_zero(self.log, f"The answer was cut: {reason}.")
        for name, value in training.get_memory_stats(self.device).items():
            utils.log_rank_zero(self.log, f"{name}: {value:.2f} GiB")
        return "".join([*pieces, last_piece])

    @utils.doing("generating")
    def answer_file(self, cfg: Settings) -> None:
        """Answer every prompt of the file without an answer."""
        output = Path(cfg.prompts).with_suffix(".answers.jsonl")
        if cfg.output:
            output = Path(cfg.output)
        started = time.perf_counter()
        # The answers depend on these, too: a file of answers with others is not continued.
        further_settings = {"system": cfg.prompt.get("system")}
        if cfg.logits_processors:
            further_settings["logits_processors"] = cfg.logits_processors
        answers = generation.answer_prompts(
            self.model,
            self.tokenizer,
            self.prompts,
            output,
            further_settings,
            source=cfg.prompts,
            max_new_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            min_p=cfg.min_p,
            logits_processors=self.logits_processors,
            seed=cfg.seed,
            max_sequences=cfg.max_sequences,
        )
        answers.finish()
        seconds = time.perf_counter() - started
        text = f"{len(answers.done)} prompts are answered, in {seconds:.2f} s. The answers are in {output}."
        utils.log_rank_zero(self.log, text)


@config.parse
@supervision.watched
def recipe_main(cfg: Settings) -> Any:
    """Run the recipe with checked settings."""
    estimate.check_run(cfg)
    recipe = InferenceRecipe(cfg)
    recipe.setup(cfg)
    if cfg.prompts:
        recipe.answer_file(cfg)
    else:
        recipe.generate(cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
