"""Generate text with a model: one prompt in, one answer out, printed as it is made.

Model and tokenizer are those of the checkpoint's folder, unless the config names others.

    tune run generate --config generation prompt.user="Why is the sky blue?"
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch

from torchtune import config, generation, training, utils
from torchtune.config import Component, Range
from torchtune.data import Message
from torchtune.models import from_hf_config
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.transforms.tokenizers import StreamDecoder, hf_tokenizer


@dataclass(kw_only=True)
class Settings:
    """Settings of text generation."""

    # Builder of the model, for example torchtune.models.llama3_2.llama3_2_1b; null reads the checkpoint's config.json.
    model: Component | None = None
    # Conversions of the described model, applied in order before any weight exists.
    model_converters: list[Component] = field(default_factory=list)
    # Tokenizer of the model, with its prompt layout; null takes that of the checkpoint's folder.
    tokenizer: Component | None = None
    # Where weights come from.
    checkpointer: Component

    # The conversation so far: a text for each of system (optional) and user.
    prompt: dict[str, str | None]
    # Longest answer, in tokens.
    max_new_tokens: Annotated[int, Range(min=1)] = 300
    # Randomness of sampling; 0 always takes the likeliest token.
    temperature: Annotated[float, Range(min=0)] = 0.6
    # Sample among the k likeliest tokens; null or 0 samples among all.
    top_k: Annotated[int | None, Range(min=0)] = None
    # Keep keys and values of earlier tokens instead of computing them again.
    enable_kv_cache: bool = True
    # Seed of sampling.
    seed: Annotated[int | None, Range(min=0)] = None

    # Device to run on: cuda, cpu, mps …; null picks the best one.
    device: str | None = None
    # Data type of weights and activations.
    dtype: Literal["bf16", "fp32"] = "bf16"
    # Passed to torch.set_deterministic_debug_mode.
    cudnn_deterministic_mode: int | str | None = None
    # Level of the messages on the terminal.
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "INFO"

    retired: ClassVar[dict[str, str]] = {
        "output_dir": "nothing is written",
        "quantizer": "the checkpoint decides how weights are stored",
    }

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what no single setting shows: (setting, what is wrong and what to do)."""
        for role in self.prompt:
            if role not in ("system", "user"):
                yield f"prompt.{role}", "is not a role: use system and user"
        for name in ("model", "tokenizer"):
            if getattr(self, name) is None and "checkpoint_dir" not in self.checkpointer:
                yield name, "is not given, and checkpointer has no checkpoint_dir to take it from: give one of them"
        if not self.prompt.get("user"):
            yield "prompt.user", "is empty: give the text to answer"


class InferenceRecipe:
    """Answers one prompt."""

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self.log = utils.get_logger(cfg.log_level)
        self.device = utils.get_device(cfg.device)
        self.dtype = training.get_dtype(cfg.dtype, device=self.device)
        training.set_seed(cfg.seed, debug_mode=cfg.cudnn_deterministic_mode)

    def setup(self, cfg: Settings) -> None:
        """Load tokenizer and model."""
        folder = cfg.checkpointer.get("checkpoint_dir")
        self.tokenizer = hf_tokenizer(folder) if cfg.tokenizer is None else config.instantiate(cfg.tokenizer)
        checkpointer = config.instantiate(cfg.checkpointer)
        with training.set_default_dtype(self.dtype), torch.device("meta"):
            self.model = from_hf_config(folder) if cfg.model is None else config.instantiate(cfg.model)
            apply_conversions(self.model, [config.instantiate(converter) for converter in cfg.model_converters])
        checkpointer.load_model(self.model, device=self.device)

    def prompt_tokens(self, prompt: dict[str, str | None]) -> list[int]:
        """Token ids of the prompt, up to where the answer begins."""
        messages = [Message(role=role, content=prompt[role]) for role in ("system", "user") if prompt.get(role)]
        messages.append(Message(role="assistant", content=""))
        return self.tokenizer({"messages": messages}, inference=True)["tokens"]

    @torch.inference_mode()
    def generate(self, cfg: Settings) -> str:
        """Print the answer as it is generated and return it."""
        tokens = self.prompt_tokens(cfg.prompt)
        started = time.perf_counter()
        pieces: list[str] = []
        decoder = StreamDecoder(self.tokenizer)
        for token in generation.stream(
            self.model,
            torch.tensor(tokens, device=self.device),
            max_generated_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            stop_tokens=self.tokenizer.stop_tokens,
            use_cache=cfg.enable_kv_cache,
        ):
            pieces.append(decoder.put(token))
            print(pieces[-1], end="", flush=True)
        rest = decoder.end()
        print(rest)
        seconds = time.perf_counter() - started
        self.log.info(f"{len(pieces)} tokens in {seconds:.2f} s, {len(pieces) / seconds:.1f} tokens/s.")
        for name, value in training.get_memory_stats(self.device).items():
            self.log.info(f"{name}: {value:.2f} GiB")
        return "".join([*pieces, rest])


@config.parse
def recipe_main(cfg: Settings) -> Any:
    """Run the recipe with checked settings."""
    training.check_run(cfg)
    recipe = InferenceRecipe(cfg)
    recipe.setup(cfg)
    recipe.generate(cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
