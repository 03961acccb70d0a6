"""Cases of the GPU benchmark: shapes, methods and batches, and the work that a step of each cannot do without."""

import dataclasses
import importlib
from typing import Any

import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, collate_documents
from torchtune.models import Description, ModelSpec

RANK = 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]


@dataclasses.dataclass(frozen=True)
class Answers:
    """Sampling in a step of GRPO.

    Attributes:
        prompts: number of prompts.
        samples: answers to each.
        prompt: tokens of a prompt.
        new: tokens of an answer.
        tokens_per_batch: most tokens of a micro-batch in training.
    """

    prompts: int
    samples: int
    prompt: int
    new: int
    tokens_per_batch: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        title: row's name in the documentation.
        builder: module under ``torchtune.models`` and function, for example ``llama3_1.llama3_1_8b``.
        lora: adapters of rank ``RANK`` on attention (and the MLP, unless it has experts) instead of full weights.
        pack: tokens of a pack.
        packs: packs of a step.
        layers: number of layers to build; None builds all.
        checkpointing: recompute activations of layers in the backward pass, where they would not fit 80 GiB.
        answers: sampling, in a step of GRPO.
        config: shipped config of the same shape and method, for a simulation; None: there is none of sampling.
    """

    title: str
    builder: str
    lora: bool
    pack: int
    packs: int
    layers: int | None = None
    checkpointing: bool = False
    answers: Answers | None = None
    config: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens that a step trains on."""
        if self.answers is None:
            return self.pack * self.packs
        return self.answers.prompts * self.answers.samples * (self.answers.prompt + self.answers.new - 1)

    def described(self, tiny: bool) -> tuple[Description, ModelSpec]:
        """Shape and family; ``tiny`` keeps the kinds of layers and shrinks every size."""
        module, _, name = self.builder.partition(".")
        with torch.device("meta"):
            model = getattr(importlib.import_module(f"torchtune.models.{module}"), name)()
        d, spec = model.description, model.spec
        layers = 4 if tiny else self.layers or d.num_layers
        changes: dict[str, Any] = {"num_layers": layers, "mixer_layers": tuple(i for i in d.mixer_layers if i < layers)}
        if tiny:
            changes |= {"vocab_size": 512, "embed_dim": 64, "intermediate_dim": 128, "num_heads": 4, "num_kv_heads": 2}
            changes |= {"head_dim": 16, "rope_dim": 16 * d.rope_dim // d.head_dim}
            if d.num_experts:
                changes |= {"num_experts": 8, "experts_per_token": 2, "expert_dim": 32}
            if d.mixer is not None:
                heads = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 16}
                changes["mixer"] = dataclasses.replace(d.mixer, **heads)
        return dataclasses.replace(d, **changes), spec

    def shrunk(self) -> "Case":
        """The case with a tiny batch."""
        answers = self.answers and Answers(prompts=2, samples=2, prompt=16, new=8, tokens_per_batch=64)
        return dataclasses.replace(self, pack=128, packs=min(self.packs, 2), answers=answers)


# The order in which they are measured: a GPU may be there for minutes only.
CASES = {
    "llama-8b-lora": Case(
        "Llama 3.1 8B, LoRA", "llama3_1.llama3_1_8b", True, 4096, 2, config="llama3_1/8B_lora_single_device"
    ),
    "llama-8b-full": Case(
        "Llama 3.1 8B, all weights, activations recomputed",
        "llama3_1.llama3_1_8b",
        False,
        4096,
        1,
        checkpointing=True,
        config="llama3_1/8B_full_single_device",
    ),
    "qwen2.5-7b-full": Case(
        "Qwen2.5 7B, all weights", "qwen2_5.qwen2_5_7b_base", False, 4096, 1, config="qwen2_5/7B_full_single_device"
    ),
    "llama-1b-full": Case(
        "Llama 3.2 1B, all weights", "llama3_2.llama3_2_1b", False, 4096, 4, config="llama3_2/1B_full_single_device"
    ),
    "qwen3-0.6b-full": Case(
        "Qwen3 0.6B, all weights", "qwen3.qwen3_0_6b_base", False, 8192, 1, config="qwen3/0.6B_full_single_device"
    ),
    "qwen3.5-9b-8-layers-full": Case(
        "Qwen3.5 9B, 8 of 32 layers, all weights",
        "qwen3_5.qwen3_5_9b",
        False,
        4096,
        2,
        layers=8,
        config="qwen3_5/9B_full",
    ),
    "qwen3-30b-a3b-lora": Case(
        "Qwen3 30B-A3B, LoRA on attention",
        "qwen3_moe.qwen3_30b_a3b_instruct",
        True,
        4096,
        1,
        config="qwen3_moe/30B_A3B_lora_single_device",
    ),
    "qwen3-4b-grpo-lora": Case(
        "Qwen3 4B, GRPO step, LoRA",
        "qwen3.qwen3_4b_instruct",
        True,
        0,
        0,
        answers=Answers(prompts=8, samples=8, prompt=256, new=256, tokens_per_batch=8192),
    ),
}


def draw_step(case: Case, vocab_size: int, index: int) -> Batch:
    """Batch of step ``index``, the same for both sides: packs of documents of about a quarter of a pack."""
    generator = torch.Generator().manual_seed(index)
    documents = []
    for _ in range(case.packs):
        left = case.pack
        while left:
            drawn = int(torch.empty(1).log_normal_(0.0, 0.5, generator=generator).mul(case.pack / 4))
            length = left if left - drawn < 8 else max(drawn, 8)
            tokens = torch.randint(vocab_size, (length,), generator=generator)
            labels = torch.cat([tokens[1:], torch.tensor([CROSS_ENTROPY_IGNORE_IDX])])
            documents.append({"tokens": tokens, "labels": labels})
            left -= length
    return collate_documents(documents)


def draw_prompts(answers: Answers, vocab_size: int, index: int) -> list[list[int]]:
    """Prompts of step ``index``, the same for both sides."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1, vocab_size, (answers.prompts, answers.prompt), generator=generator).tolist()


def needed_flops(d: Description, model: torch.nn.Module, lora: bool, batch: Batch) -> float:
    """Floating-point operations of a training step that cannot be left out.

    Products with weights (a frozen weight has no gradient), attention within documents, the recurrence of gated delta
    rules, and the output at labeled positions. Recomputation and padding do not count.

    Args:
        d: shape of the model.
        model: with or without adapters, on any device.
        lora: whether only adapters are trained.
        batch: of :func:`draw_step`.
    """
    tokens = batch.tokens.numel()
    labelled = int((batch.labels != CROSS_ENTROPY_IGNORE_IDX).sum())
    weights = adapters = 0.0
    for name, parameter in model.layers.named_parameters():
        if ".lora_" in name:
            adapters += parameter.numel()
        elif parameter.ndim == 2:
            weights += parameter.numel()
        elif d.num_experts and parameter.ndim == 3 and parameter.shape[0] == d.num_experts:
            weights += parameter.numel() * d.experts_per_token / d.num_experts
    passes = 2 if lora else 3  # forward, gradient of the input, and of the weight if it is trained
    products = 2 * passes * (weights * tokens + d.vocab_size * d.embed_dim * labelled) + 6 * adapters * tokens
    pairs = sum(length * (length + 1) // 2 for length in batch.documents.lengths)
    attention = 3 * 4 * (d.num_layers - len(d.mixer_layers)) * d.num_heads * d.head_dim * pairs
    m = d.mixer
    state = m.num_value_heads * m.key_dim * m.value_dim if m is not None else 0
    return products + attention + 3 * 6 * len(d.mixer_layers) * state * tokens
