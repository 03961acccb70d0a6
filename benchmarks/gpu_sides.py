"""Training steps of the GPU benchmark: this library's, and a plain loop over a transformers model with peft.

Weights are random. Ours are described on the meta device, converted, and allocated once, in bf16, where they train.
"""

from functools import partial
from typing import Any

import torch
from gpu_cases import ATTENTION, RANK, Case, draw_prompts, draw_step
from torch import Tensor, nn

from torchtune import rlhf, training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch
from torchtune.models import build
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.peft import LoRA
from torchtune.rlhf.loss import GRPOLoss


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Fill newly allocated weights: small random matrices, ones elsewhere."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(1.0)


def build_ours(case: Case, tiny: bool, device: torch.device) -> nn.Module:
    """The model with random weights, adapters included."""
    description, spec = case.described(tiny)
    with training.set_default_dtype(torch.bfloat16), torch.device("meta"):
        model = build(description, spec)
        if case.lora:
            with_mlp = not description.num_experts
            apply_conversions(model, [LoRA(rank=RANK, alpha=2 * RANK, attn_modules=ATTENTION, apply_to_mlp=with_mlp)])
    if case.checkpointing:
        training.checkpoint_activations(model, every_layer=True)
    model.to_empty(device=device)
    randomize(model)
    return model.train()


def build_transformers(case: Case, tiny: bool, device: torch.device) -> nn.Module:
    """The same shape in transformers, with peft for adapters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    description, spec = case.described(tiny)
    settings = spec.to_hf_config(description)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if case.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if description.num_experts else "all-linear"
        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    return model


class OurSteps:
    """Steps of this library, put together as in its recipes.

    Args:
        case: shape, method and batch.
        tiny: shrink the shape.
        device: of the model.
        precision: ``optimizer_precision`` of the recipes.
    """

    def __init__(self, case: Case, tiny: bool, device: torch.device, precision: str) -> None:
        self.case, self.device, self.model = case, device, build_ours(case, tiny, device)
        self.vocab_size = self.model.description.vocab_size
        self.loss_fn = GRPOLoss() if case.answers else LinearCrossEntropyLoss()
        if case.answers:
            # Random weights hardly ever sample token 0.
            self.sampler = rlhf.LocalSampler(
                self.model, None, max_new_tokens=case.answers.new, max_sequences=None, stop_tokens=[0]
            )
            rlhf.setup_policy_loss(self.loss_fn, self.model, self.sampler)
        factory = partial(torch.optim.AdamW, lr=1e-5, fused=True)
        self.optimizer = training.setup_optimizer(factory, self.model, precision=precision)

    def compile(self) -> None:
        """Compile layers and loss."""
        training.compile_model(self.model, verbose=False)
        training.compile_loss(self.loss_fn, verbose=False)

    def batches(self, index: int) -> list[Any]:
        """Micro-batches of step ``index``; answers are sampled here."""
        if self.case.answers is None:
            return [draw_step(self.case, self.vocab_size, index)]
        answers = self.case.answers
        prompts = draw_prompts(answers, self.vocab_size, index)
        seeds = [rlhf.prompt_seed(index, number) for number in range(answers.prompts)]
        rollouts = self.sampler(prompts, answers.samples, seeds)
        advantages = [1.0 if number % 2 else -1.0 for number in range(len(rollouts))]
        return rlhf.rollout_batches(
            rollouts,
            advantages,
            tokens_per_batch=answers.tokens_per_batch,
            dims=training.ParallelDims(),
            blank=prompts[0],
            share_prefix=rlhf.can_share_prefixes(self.model, None),
        )[0]

    def loss(self, batch: Batch) -> Tensor:
        """Sum over the labels of a micro-batch."""
        batch = batch.to(self.device, non_blocking=True)
        hidden = self.model(**batch.model_inputs(), output="hidden")
        if self.case.answers is None:
            return self.loss_fn.sum_and_count(hidden, batch.labels, self.model.output, index=batch.label_index)[0]
        scores = self.loss_fn.score(hidden, batch, self.model.output)
        return self.loss_fn.sum_and_metrics(batch, scores)[0]

    def train(self, batches: list[Batch]) -> Tensor:
        """Forward, backward, update; returns the mean loss."""
        labels = sum(batch.num_labels for batch in batches)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self.loss(batch) / labels
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def layer_kinds(self) -> dict[str, nn.Module]:
        """Parts of the model whose kernels are counted apart, by module path; the type is the kind."""
        layers = self.model.layers.named_children()
        found = {f"{i}.{name}": child for i, layer in layers for name, child in layer.named_children()}
        ends = {"embedding": self.model.tok_embeddings, "norm": self.model.norm}
        return {name: child for name, child in {**found, **ends}.items() if not isinstance(child, nn.Identity)}


class TransformersSteps:
    """The same with transformers and peft: a pack is one causal row, and the loss comes from the model.

    Args:
        case: as of :class:`OurSteps`, and so ``tiny`` and ``device``.
        tiny: see above.
        device: see above.
        precision: not used: parameters and optimizer states are bf16.
    """

    def __init__(self, case: Case, tiny: bool, device: torch.device, precision: str) -> None:
        self.case, self.device, self.model = case, device, build_transformers(case, tiny, device)
        self.vocab_size, self.forward = self.model.config.vocab_size, self.model
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def compile(self) -> None:
        """Compile the model."""
        self.forward = torch.compile(self.model)

    def batches(self, index: int) -> list[Any]:
        """Micro-batches of step ``index``: rows of packs, or answers."""
        if self.case.answers is None:
            batch = draw_step(self.case, self.vocab_size, index)
            # transformers shifts labels itself
            ignored = batch.labels == CROSS_ENTROPY_IGNORE_IDX
            labels = torch.where(ignored, CROSS_ENTROPY_IGNORE_IDX, batch.tokens)
            return [tuple(t.view(self.case.packs, self.case.pack) for t in (batch.tokens, labels))]
        return self._answers(index)

    @torch.no_grad()
    def _answers(self, index: int) -> list[Any]:
        answers = self.case.answers
        prompts = torch.tensor(draw_prompts(answers, self.vocab_size, index), device=self.device)
        prompts = prompts.repeat_interleave(answers.samples, 0)
        self.model.eval()
        length = {"max_new_tokens": answers.new, "min_new_tokens": answers.new}
        rows = self.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            use_cache=True,
            **length,
        )
        self.model.train()
        return list(rows.split(max(answers.tokens_per_batch // rows.shape[1], 1)))

    def loss(self, batch: Any) -> Tensor:
        """Mean over the labels of a micro-batch."""
        if self.case.answers is None:
            tokens, labels = (t.to(self.device, non_blocking=True) for t in batch)
            return self.forward(input_ids=tokens, labels=labels, use_cache=False).loss
        new = self.case.answers.new
        logits = self.forward(input_ids=batch[:, :-1], use_cache=False, logits_to_keep=new).logits.float()
        chosen = logits.gather(-1, batch[:, -new:, None]).squeeze(-1) - logits.logsumexp(-1)
        signs = 1.0 - 2.0 * (torch.arange(len(batch), device=self.device) % 2)
        ratio = (chosen - chosen.detach()).exp()
        return (ratio * signs[:, None]).mean()

    def train(self, batches: list[Any]) -> Tensor:
        """Forward, backward, update; returns the mean loss."""
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self.loss(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


SIDES = {"ours": OurSteps, "transformers": TransformersSteps}
