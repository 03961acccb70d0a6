"""A recipe with typed settings, as short as one can be."""

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from torchtune import config
from torchtune.config import Component, Range, RuntimeArgs


@dataclass(kw_only=True)
class Settings:
    """Settings of the typed fixture."""

    # Where everything is written,
    # the resolved config too.
    output_dir: str
    # Builder of the model.
    model: Component
    model_converters: list[Component] = field(default_factory=list)
    # Text to ids.
    tokenizer: Component
    # Training data; a list is concatenated.
    dataset: Annotated[Component | list[Component], RuntimeArgs("tokenizer")]
    dataset_val: Annotated[Component | list[Component] | None, RuntimeArgs("tokenizer")] = None
    optimizer: Annotated[Component, RuntimeArgs("params", rules={"lr": Range(min=0), "weight_decay": Range(min=0)})]
    lr_scheduler: Annotated[
        Component | None, RuntimeArgs("optimizer", keywords=("num_training_steps", "last_epoch"))
    ] = None
    loss: Annotated[Component, RuntimeArgs(rules={"num_output_chunks": Range(min=1)})]
    sampler: Annotated[Component | None, RuntimeArgs(keywords=("vocab_size",))] = None
    metric_logger: Component | None = None
    # Examples per micro-batch.
    batch_size: Annotated[int, Range(min=1)] = 2
    batch_size_val: Annotated[int | None, Range(min=1)] = None
    epochs: Annotated[int, Range(min=1)] = 1
    seed: Annotated[int | None, Range(min=0)] = None
    dtype: Literal["bf16", "fp32"] = "bf16"
    clip_grad_norm: Annotated[float | None, Range(above=0)] = None
    optimizer_in_bwd: bool = False
    buckets: list[int] = field(default_factory=list)
    prompt: dict[str, str | None] = field(default_factory=dict)
    hub_token: str | None = None
    debug_mode: int | str | None = None

    retired: ClassVar[dict[str, str]] = {"low_cpu_ram": "weights are always streamed"}

    def check(self):
        """Cross-field rules."""
        if self.optimizer_in_bwd and self.clip_grad_norm is not None:
            yield "clip_grad_norm", "cannot be used with optimizer_in_bwd"


@config.parse
def recipe_main(cfg: Settings) -> Any:
    """Print what arrived."""
    print(f"batch_size={vars(cfg)['batch_size']} lr={cfg.optimizer.lr}")  # vars: any setting may be read
    return 3 if cfg.epochs == 33 else None


if __name__ == "__main__":
    sys.exit(recipe_main())
