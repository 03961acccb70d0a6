"""Components of the fixture recipes: small stand-ins with the shapes of real ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from torchtune.config import Configurable, Range


class Model:
    """A class with typed arguments."""

    def __init__(self, width: int, layers: int = 2, activation: Literal["gelu", "silu"] = "gelu", dropout: float = 0.0):
        self.width = width
        self.layers = layers
        self.activation = activation
        self.dropout = dropout


def tiny_model(lora_attn_modules: list[str], lora_rank: int = 8, lora_alpha: float = 16, apply_to_mlp: bool = False):
    """A builder with a required list."""
    return Model(width=lora_rank)


class Tokenizer:
    """Wants a path and takes a template."""

    def __init__(self, path: str, max_seq_len: int | None = None, prompt_template: Any = None):
        self.path = path
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template


class Template:
    """Nested in a tokenizer."""

    def __init__(self, user: str = "", assistant: str = ""):
        self.user = user
        self.assistant = assistant


def load_rows(source: str, name: str | None = None, split: str | None = None, streaming: bool = False, **config: Any):
    """The end of a chain of keyword arguments; the last ones feed nobody."""
    return [source]


class RowsDataset:
    """In the middle of the chain."""

    def __init__(
        self,
        *,
        source: str,
        tokenizer: Any,
        filter_fn: Callable[..., bool] | None = None,
        **load_kwargs: Any,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.filter_fn = filter_fn
        self.rows = load_rows(source, **load_kwargs)


def chat_dataset(
    tokenizer: Any,
    *,
    source: str = "rows",
    column_map: Mapping[str, str] | None = None,
    packed: bool = False,
    split: str = "train",
    **load_kwargs: Any,
) -> RowsDataset:
    """The start of the chain."""
    return RowsDataset(source=source, tokenizer=tokenizer, split=split, **load_kwargs)


alpaca_like = partial(chat_dataset, source="alpaca")


class Optimizer:
    """Positional parameters first, like those of torch."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0
    ):
        self.params = params
        self.lr = lr
        self.betas = betas
        self.weight_decay = weight_decay


def warmup_schedule(optimizer: Any, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1) -> Any:
    """Takes an optimizer by position and two numbers by name from the recipe."""
    return optimizer, num_warmup_steps, num_training_steps, last_epoch


class Loss:
    """All arguments have defaults."""

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100):
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index


class Sampler(Configurable):
    """A component that states its settings."""

    @dataclass(kw_only=True)
    class Config:
        # Randomness.
        temperature: Annotated[float, Range(min=0)] = 1.0
        # How to choose.
        strategy: Literal["greedy", "nucleus"] = "nucleus"
        top_p: float = 1.0

        def check(self):
            if self.strategy == "greedy" and self.top_p < 1:
                yield "top_p", "has no meaning with strategy=greedy"

        def __post_init__(self):
            if self.top_p > 1:
                raise ValueError("top_p is a probability: at most 1")

    def __init__(self, config: Config, *, vocab_size: int = 10):
        self.config = config
        self.vocab_size = vocab_size


class Logger:
    """Keyword arguments taken out one by one."""

    def __init__(self, log_dir: str, **kwargs: Any):
        self.log_dir = log_dir
        self.project = kwargs.pop("project", "default")
        self.group = kwargs.get("group")
