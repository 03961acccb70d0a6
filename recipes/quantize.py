"""Quantize a checkpoint to a folder with fewer bits per weight, for vLLM, transformers or llama.cpp.

One tensor is in memory at a time. Embeddings, norms and the output projection keep their precision; tokenizer, chat
template and generation settings are copied.

    tune run quantize --config quantization checkpointer.checkpoint_dir=/tmp/torchtune/my_run/epoch_0
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from torchtune import checkpoints, config, training, utils
from torchtune.config import Component
from torchtune.training import quantization


@dataclass(kw_only=True)
class Settings:
    """Settings of quantization."""

    # Folder for the quantized model; it must not exist yet.
    output_dir: str
    # Builder of the model, for example torchtune.models.llama3_2.llama3_2_1b; null: by the checkpoint's config.json.
    model: Component | None = None
    # Checkpointer: source of the weights.
    checkpointer: Component
    # Quantizer of the weights, for example torchtune.training.quantization.Int4WeightOnlyQuantizer.
    quantizer: Component

    # Device to run on: cuda, cpu, mps …; null: the best one.
    device: str | None = None
    # Dtype of weights that are not quantized.
    dtype: Literal["bf16", "fp32"] = "bf16"
    # Log level of the terminal.
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "INFO"

    retired: ClassVar[dict[str, str]] = {
        "seed": "nothing here is random",
        "cudnn_deterministic_mode": "nothing here is random",
    }

    def __post_init__(self) -> None:
        folder = self.checkpointer.get("checkpoint_dir")
        if self.model is None and folder is not None:
            self.model = {"_component_": "torchtune.models.from_hf_config", "checkpoint_dir": folder}

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (setting, error and remedy) for invalid combinations of settings."""
        if self.model is None:
            yield "model", "is not given, and checkpointer has no checkpoint_dir to take it from: give one of them"


class QuantizationRecipe:
    """Quantization of a checkpoint's weights."""

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self.log = utils.get_logger(cfg.log_level)
        self.device = utils.get_device(cfg.device)
        self.dtype = training.get_dtype(cfg.dtype, device=self.device)

    def setup(self, cfg: Settings) -> None:
        """Build the model on the meta device, without loading weights."""
        self.quantizer = config.instantiate(cfg.quantizer)
        self.checkpointer = config.instantiate(cfg.checkpointer)
        with training.set_default_dtype(self.dtype), torch.device("meta"):
            self.model = config.instantiate(cfg.model)

    def quantize(self, cfg: Settings) -> None:
        """Save the quantized checkpoint."""
        source = self.checkpointer.source()
        checkpoints.quantize_checkpoint(
            source, self.model, self.quantizer, cfg.output_dir, device=self.device, dtype=self.dtype
        )
        mode = quantization.get_quantizer_mode(self.quantizer)
        self.log.info(f"{cfg.output_dir} holds the model of {source.checkpoint_dir} quantized ({mode}).")


@config.parse
def recipe_main(cfg: Settings) -> Any:
    """Run the recipe with checked settings."""
    recipe = QuantizationRecipe(cfg)
    recipe.setup(cfg)
    recipe.quantize(cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
