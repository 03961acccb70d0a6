"""Reinforcement learning from a reward model: PPO, with a model of values.

A step samples an answer to each prompt. The reward model scores it, every token pays for its distance to the reference,
and the value model says what was to be expected: the policy makes likelier what went better. Policy and value model are
trained together and saved together, the value model in the subfolder value; a resumed run samples the same answers
again. Nothing is padded; every answer is written to rollouts.jsonl. A policy with adapters trains these alone. Runs on
one device, or on many, over which all four models are sharded. docs/ppo.rst says when to use it and what to watch.

    tune run ppo --config smol/135M_full_ppo_single_device kl_coeff=0.05
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch

from torchtune import config, datasets, rlhf, training, utils
from torchtune.config import Component, PositiveInt, Range
from torchtune.data import Batch, BatchLoader
from torchtune.modules.conversion import apply_conversions, run_post_optimizer_hooks, run_pre_optimizer_hooks
from torchtune.modules.peft import has_adapters


@dataclass(kw_only=True)
class Settings:
    """Settings of PPO."""

    # Builder of the policy, the model that answers: with adapters they are trained, without them all weights.
    policy_model: Component
    # Builder of the reward model and of the value model: torchtune.modules.classifier_model with num_classes=1.
    reward_and_value_model: Component
    # Tokenizer of the model, with its prompt layout.
    tokenizer: Component
    # Where weights come from and where checkpoints go.
    checkpointer: config.CheckpointerComponent
    # Weights that the value model begins with, usually those of the reward model.
    value_checkpointer: Component
    # Weights of the reward model, which stays as it is.
    reward_checkpointer: Component
    # Weights of the reference, usually those that the policy begins with; it stays as it is.
    ref_policy_checkpointer: Component
    # Training data; several datasets are concatenated.
    dataset: config.DatasetComponent
    # Where checkpoints, logs and the resolved config are written.
    output_dir: str
    # Continue from the newest complete checkpoint of output_dir.
    resume_from_checkpoint: bool = False

    # Passes over the training data.
    epochs: PositiveInt = 1
    # Most optimizer steps per epoch; null takes all of them.
    max_steps_per_epoch: PositiveInt | None = None
    # Examples (or packs) per micro-batch.
    batch_size: PositiveInt = 2
    # Micro-batches per optimizer step.
    gradient_accumulation_steps: PositiveInt = 1
    # Optimizer of the trained parameters.
    optimizer: config.OptimizerComponent
    # Schedule of the learning rate, stepped after every optimizer step.
    lr_scheduler: config.SchedulerComponent | None = None
    # Loss: a sum over labelled tokens (pairs, …), divided by their number in the whole step.
    loss: config.LossComponent
    # Largest norm of the gradients; larger ones are scaled down to it.
    clip_grad_norm: Annotated[float | None, Range(above=0)] = None

    # Answers to sample in the whole run on a device, one to a prompt; null answers the prompts of all epochs.
    num_steps: PositiveInt | None = None
    # Answers that are sampled and scored at once, which bounds the memory of the KV cache; null takes all of a step.
    forward_batch_size: PositiveInt | None = None
    # Most tokens of an answer.
    max_generated_tokens: PositiveInt = 256
    # Divides the logits, when sampling and in the loss.
    temperature: Annotated[float, Range(above=0)] = 1.0
    # Must be null: tokens are sampled from the whole distribution, which ratios are taken of.
    top_k: int | None = None
    # Tokens that end an answer; null takes those of the tokenizer.
    stop_token_ids: list[int] | None = None
    # Shorter answers get reward_penalty; null penalises none.
    min_response_length: PositiveInt | None = None
    # Give reward_penalty to answers that do not end within max_generated_tokens.
    penalise_no_eos: bool = True
    # What a penalised answer gets in the place of its score.
    reward_penalty: float = -3.0
    # Weight of the log-ratio to the reference, which every token pays.
    kl_coeff: Annotated[float, Range(min=0)] = 0.01
    # Divide the rewards of tokens by their standard deviation.
    whiten_rewards: bool = False
    # Discount of later rewards.
    gamma: Annotated[float, Range(min=0, max=1)] = 1.0
    # Mixes the value model's next estimate (0) and the whole rest of the answer (1) into advantages.
    lmbda: Annotated[float, Range(min=0, max=1)] = 0.95
    # Passes over the answers of a step.
    ppo_epochs: PositiveInt = 1
    # Answers of an optimizer step on a device; null takes all answers of a step.
    ppo_batch_size: PositiveInt | None = None
    # Steps between two tables of answers in the log; null shows none.
    show_samples_every_n_steps: PositiveInt | None = 10

    # Device to run on: cuda, cpu, mps …; null picks the best one.
    device: str | None = None
    # Data type of weights and activations; null takes the best one that the device computes fast.
    dtype: Literal["bf16", "fp32"] | None = None
    # Seed of everything random; null draws one and writes it into the saved config.
    seed: Annotated[int | None, Range(min=0)] = None
    # Where metrics go.
    metric_logger: Component
    # Steps between two records of metrics.
    log_every_n_steps: PositiveInt = 1

    # Recompute activations in the backward pass to save memory.
    enable_activation_checkpointing: bool = False
    # Recompute some activations: full (every layer), or selective, which ac_option explains.
    ac_mode: Literal["full", "selective"] | None = None
    # n recomputes every n-th layer; op keeps attention and every other matrix product in all layers.
    ac_option: int | str | None = None
    # Keep activations in host memory between forward and backward (CUDA, with activation checkpointing).
    enable_activation_offloading: bool = False
    # Compile every layer and the loss.
    compile: bool = False
    # Precision of updates to bf16 weights: stochastic_rounding (no extra memory), fp32_master, or param_dtype (as is).
    optimizer_precision: Literal["stochastic_rounding", "fp32_master", "param_dtype"] = "stochastic_rounding"
    # Step each parameter in the backward pass as soon as its gradient is ready, and free the gradient.
    optimizer_in_bwd: bool = False

    # Data on which the loss is measured every run_val_every_n_steps.
    dataset_val: config.DatasetComponent | None = None
    # Examples per batch of validation; null means batch_size.
    batch_size_val: PositiveInt | None = None
    # Steps between two measurements of the validation loss; null never measures it.
    run_val_every_n_steps: PositiveInt | None = None
    # Metric of validation, such as val_loss (max:val_x: more is better), whose best checkpoint is saved and kept.
    keep_best: str | None = None
    # Validations without a better one (keep_best, or val_loss) after which the run ends; null never ends it.
    early_stopping_patience: PositiveInt | None = None

    # Steps between two checkpoints, with one more at the end; null saves after every epoch.
    save_every_n_steps: PositiveInt | None = None
    # Minutes after which a checkpoint is saved in addition; null saves by steps alone.
    save_every_n_minutes: Annotated[float | None, Range(above=0)] = None
    # Write checkpoints in the background, from a copy in host memory.
    enable_async_checkpointing: bool = False
    # Save only adapters, never the merged model.
    save_adapter_weights_only: bool = False

    # Replicas of the model, each with its own examples (HSDP where parameters are sharded too).
    data_parallel_replicate_dim: PositiveInt = 1
    # Ranks over which FSDP shards a replica, each with its own examples; -1 takes the remaining ranks.
    data_parallel_shard_dim: Annotated[int, Range(min=-1)] = -1
    # Expert parallel ranks, out of the shards: each has other experts, and tokens go to the rank of their expert.
    expert_parallel_dim: PositiveInt = 1
    # Keep parameters, gradients and optimizer states in host memory.
    fsdp_cpu_offload: bool = False
    # Free the all-gathered parameters of a layer after its forward pass; False communicates less, needs more memory.
    fsdp_reshard_after_forward: bool = True
    # Modules to shard separately, besides the layers, for example [tok_embeddings, output].
    custom_sharded_layers: list[str] | None = None

    # Conversions of the described model, applied in order before any weight exists.
    model_converters: list[Component] = field(default_factory=list)

    # Visit the examples of an epoch in random order.
    shuffle: bool = True
    # Function that turns a list of prompts into a batch.
    collate_fn: str = "torchtune.rlhf.collate_prompts"
    # Steps with a loss or gradient that is not finite are skipped; this many in a row end the run.
    max_skipped_steps: PositiveInt = 10
    # Skip steps with a loss this many standard deviations above the recent mean; null skips none.
    loss_spike_threshold: Annotated[float | None, Range(above=0)] = None
    # End the run, and name the stalled rank, after this many minutes without progress; null waits for ever.
    hang_timeout_minutes: Annotated[float | None, Range(above=0)] = 30.0
    # Passed to torch.set_deterministic_debug_mode.
    cudnn_deterministic_mode: int | str | None = None
    # Log the peak memory with the metrics.
    log_peak_memory_stats: bool = True
    # Level of the messages on the terminal.
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "INFO"
    # Profiler of a window of steps.
    profiler: Component | None = None

    retired: ClassVar[dict[str, str]] = {
        "enable_kv_cache": "answers are always sampled with a cache",
    }

    @property
    def model(self) -> Component:
        """The policy, under the name that other recipes have."""
        return self.policy_model

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield what no single setting shows: (setting, what is wrong and what to do)."""
        yield from training.check_settings(self)
        yield from rlhf.check_ppo_settings(self)
        if self.top_k is not None:
            yield "top_k", "changes the distribution that ratios are taken of: set it to null"


class PPORecipe:
    """Trains a policy on what a reward model says of its answers, and a value model with it."""

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self.device = utils.get_device(cfg.device)
        self.dims = training.ParallelDims.start(
            self.device,
            dp_replicate=cfg.data_parallel_replicate_dim,
            dp_shard=cfg.data_parallel_shard_dim,
            ep=cfg.expert_parallel_dim,
        )
        self.log = utils.get_run_logger(cfg.output_dir, cfg.log_level)
        cfg.dtype, self.dtype = training.choose_dtype(cfg.dtype, self.device)
        self.checkpointer = config.instantiate(cfg.checkpointer)
        self.checkpointer.add_source("value", config.instantiate(cfg.value_checkpointer))
        self.checkpointer.add_source("reward", config.instantiate(cfg.reward_checkpointer))
        self.checkpointer.add_source("reference", config.instantiate(cfg.ref_policy_checkpointer))
        resume = cfg.resume_from_checkpoint or training.is_restart()
        self.resume_point = self.checkpointer.open_output_dir(cfg, resume=resume)
        seed = self.resume_point.progress["seed"] if self.resume_point else cfg.seed
        self.seed = cfg.seed = training.set_seed(seed, debug_mode=cfg.cudnn_deterministic_mode)
        self.global_step = 0

    def setup(self, cfg: Settings) -> None:
        """Build everything that training needs; nothing is trained or written yet."""
        self.tokenizer = config.instantiate(cfg.tokenizer)
        self.loader = self.setup_loader(cfg.dataset, cfg.batch_size, training_data=True)
        self.loader_val = cfg.dataset_val and self.setup_loader(cfg.dataset_val, cfg.batch_size_val or cfg.batch_size)
        self.total_steps = cfg.epochs * len(self.loader)

        self.model = self.setup_model(cfg)
        if cfg.compile:
            training.compile_loss(self.loss_fn)
        self.offloading = training.get_act_offloading_ctx_manager(self.model, cfg.enable_activation_offloading)
        self.optimizer = training.setup_optimizer(
            partial(config.instantiate, cfg.optimizer), self.model, cfg.optimizer_precision, cfg.optimizer_in_bwd
        )
        self.lr_scheduler = config.instantiate(
            cfg.lr_scheduler, self.optimizer, num_training_steps=self.total_steps, last_epoch=-1
        )
        self.metric_logger = training.main_process_logger(partial(config.instantiate, cfg.metric_logger), self.dims)
        self.metric_logger.log_config(cfg)
        self.profiler = training.profiler_from_config(cfg.profiler)
        self.step_metrics = training.StepMetrics()
        self.guard = training.StepGuard(
            self.step_metrics, self.loader, self.dims, cfg.output_dir, cfg.max_skipped_steps, cfg.loss_spike_threshold
        )
        self.best = training.BestValidation(cfg.output_dir, cfg.keep_best, cfg.early_stopping_patience, self.dims)
        if self.resume_point is not None:
            state = self.training_state()
            self.checkpointer.resume(self.resume_point, self.model, state)
            self.global_step = state["progress"]["global_step"]
            self.log.info(f"Resuming from {self.resume_point.path} at step {self.global_step} of {self.total_steps}.")

    def setup_model(self, cfg: Settings) -> torch.nn.ModuleDict:
        """Load the policy and the value model, what answers and scores, then wrap what is trained."""
        policy = self.load_model(cfg, cfg.policy_model, cfg.model_converters, "policy")
        value = self.load_model(cfg, cfg.reward_and_value_model, [], "value")
        models = torch.nn.ModuleDict({"policy": policy, "value": value})
        contents = training.checkpoint_contents(models, merge=not cfg.save_adapter_weights_only)
        self.checkpointer.check_contents(models, contents=contents)
        training.fit_vocabulary(policy, self.tokenizer)
        self.setup_rollouts(cfg, models)
        for model in models.values():
            training.checkpoint_activations(model, cfg.enable_activation_checkpointing, cfg.ac_mode, cfg.ac_option)
            if cfg.compile:
                training.compile_model(model)
        return models

    def load_model(self, cfg: Settings, builder: Any, converters: list[Any], name: str) -> torch.nn.Module:
        """Describe, convert, split, then load: each process reads its own share of the weights."""
        with training.set_default_dtype(self.dtype), torch.device("meta"):
            model = config.instantiate(builder)
            apply_conversions(model, [config.instantiate(converter) for converter in converters])
        training.parallelize(
            model,
            self.dims,
            device=self.device,
            cpu_offload=cfg.fsdp_cpu_offload,
            reshard_after_forward=cfg.fsdp_reshard_after_forward,
            custom_sharded_layers=cfg.custom_sharded_layers,
        )
        is_frozen = name in ("reference", "reward")
        device = "cpu" if cfg.fsdp_cpu_offload else self.device
        self.checkpointer.load_model(model, device=device, name=name, whole=is_frozen and not has_adapters(model))
        return model.requires_grad_(False).eval() if is_frozen else model

    def setup_loader(self, dataset: Any, batch_size: int, *, training_data: bool = False) -> BatchLoader:
        """This rank's batches of prompts; their order depends only on the seed and the epoch."""
        prompts = rlhf.numbered_prompts(datasets.instantiate_dataset(dataset, self.tokenizer), self.tokenizer)
        most = None
        if training_data:
            most = rlhf.steps_per_epoch(self.cfg.num_steps, len(prompts) // self.dims.data_size, batch_size)
            most = most or self.cfg.max_steps_per_epoch
        return BatchLoader(
            prompts,
            batch_size=batch_size,
            collate_fn=self.dims.collate(datasets.instantiate_collate(self.cfg.collate_fn, self.tokenizer)),
            shuffle=self.cfg.shuffle and training_data,
            seed=self.seed,
            max_steps_per_epoch=most,
            rank=self.dims.data_rank,
            world_size=self.dims.data_size,
        )

    def setup_rollouts(self, cfg: Settings, models: torch.nn.ModuleDict) -> None:
        """What answers prompts, scores the answers, and is compared with."""
        self.sampler = rlhf.LocalSampler(
            models["policy"],
            self.tokenizer,
            max_new_tokens=cfg.max_generated_tokens,
            max_sequences=cfg.forward_batch_size,
            temperature=cfg.temperature,
            stop_tokens=cfg.stop_token_ids,
        )
        self.loss_fn = rlhf.setup_ppo_loss(config.instantiate(cfg.loss), models)
        self.loss_fn.temperature = self.sampler.temperature
        self.reference = self.load_model(cfg, cfg.policy_model, cfg.model_converters, "reference")
        reward = self.load_model(cfg, cfg.reward_and_value_model, [], "reward")
        self.reward_model = rlhf.RewardModel(
            reward,
            self.tokenizer,
            cfg.forward_batch_size,
            cfg.reward_penalty,
            cfg.penalise_no_eos,
            cfg.min_response_length,
            dims=self.dims,
        )
        every = {**models, "reference": self.reference, "reward": reward}
        rlhf.check_ppo_models(every, self.checkpointer, self.tokenizer)
        shortest = min(every.values(), key=lambda model: model.max_seq_len)
        for loader in filter(None, (self.loader, self.loader_val)):
            rlhf.check_prompts(loader.dataset, self.sampler, shortest, 1 + len(self.reward_model.closing))
        self.record = rlhf.RolloutRecord(cfg.output_dir, self.tokenizer, self.dims, cfg.show_samples_every_n_steps)

    def sample(self, batches: list[Batch], num_samples: int, *, greedy: bool = False) -> rlhf.ScoredRollouts:
        """Answer prompts and score the answers, which depend on the seed, the step and the row alone."""
        prompts = [prompt for batch in batches for prompt in batch.prompts]
        seeds = [rlhf.prompt_seed(self.seed, self.global_step, prompt.number) for prompt in prompts]
        rollouts = self.sampler([prompt.tokens for prompt in prompts], num_samples, None if greedy else seeds)
        return rlhf.judge_rollouts(prompts, rollouts, self.reward_model, self.tokenizer)

    def make_experience(self, prompts: list[Batch]) -> tuple[Iterable[tuple[list[Batch], int]], int, int]:
        """Rollouts, scores, values, advantages: micro-batches and labels of every update, tokens and labels."""
        cfg = self.cfg
        scored = self.sample(prompts, num_samples=1)
        tokens = rlhf.evaluate_rollouts(
            scored, self.reference, self.model["value"], cfg.temperature, cfg.forward_batch_size, dims=self.dims
        )
        found = rlhf.ppo_advantages(
            tokens, scored, cfg.kl_coeff, cfg.gamma, cfg.lmbda, cfg.whiten_rewards, dims=self.dims
        )
        self.step_metrics.log_mean(scored.figures() | found.figures)
        (num_labels,) = self.dims.sum(int(tokens.mask.sum()))
        means = found.advantages.sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True).clamp(min=1)
        self.record.write(self.global_step + 1, scored, means, num_labels)
        updates = rlhf.ppo_updates(
            scored,
            tokens,
            found,
            cfg.ppo_epochs,
            cfg.ppo_batch_size,
            cfg.gradient_accumulation_steps,
            seeds=(self.seed, self.global_step),
            device=self.device,
            dims=self.dims,
        )
        return updates, sum(len(rollout.tokens) - 1 for rollout in scored.rollouts), num_labels

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Loss of policy and value model, summed over the tokens of one batch, as a scalar."""
        policy, value = self.model["policy"], self.model["value"]
        with self.offloading:
            hidden = policy(**batch.model_inputs(), output="hidden")
            log_probs = self.loss_fn.score(hidden, batch, policy.output)
            hidden = value(**batch.model_inputs(), output="hidden")
            values = rlhf.token_values(hidden, batch, value.output)
            total, figures = self.loss_fn.sum_and_metrics(batch, torch.stack([log_probs, values]))
            self.step_metrics.log_mean(figures)
            return total

    def train(self) -> int:
        """Run the remaining steps, save, validate and log on the way; return the exit code of the process."""
        cfg = self.cfg
        self.model.train()
        throughput = training.Throughput(model=self.model, dims=self.dims, device=self.device, step=self.global_step)
        control = training.RunControl(
            self.dims, cfg.output_dir, cfg.save_every_n_steps, cfg.save_every_n_minutes, best=self.best
        )
        training.reset_memory_stats(self.device)
        with (
            control,
            training.watch_run(cfg, self.dims, throughput, cfg.hang_timeout_minutes),
            training.ProgressBar(total=self.total_steps, initial=self.global_step) as progress,
            self.profiler as profiler,
        ):
            for step in control.steps(self.loader, cfg.epochs, throughput):
                with throughput.paused("sampling"):
                    updates, num_tokens, num_labels = self.make_experience(step.batches)
                metrics = {}
                for batches, num_terms in updates:
                    metrics |= self.update(control, batches, num_terms)
                metrics["lr"] = training.get_lr(self.optimizer)
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step()
                self.global_step += 1
                throughput.step(processed=num_tokens, trained=num_labels)
                profiler.step()

                if self.global_step % cfg.log_every_n_steps == 0:
                    metrics |= self.guard.metrics() | throughput.metrics()
                    metrics |= training.get_memory_stats(self.device) if cfg.log_peak_memory_stats else {}
                    self.metric_logger.log_dict(metrics, step=self.global_step)
                    progress.update_metrics(metrics)
                progress.advance(self.global_step)
                if cfg.run_val_every_n_steps and self.global_step % cfg.run_val_every_n_steps == 0:
                    with throughput.paused("validation"):
                        metrics = self.validate()
                    self.metric_logger.log_dict(metrics, step=self.global_step)
                    progress.update_metrics(metrics)
                    control.record_validation(self.global_step, metrics)
                if name := control.checkpoint_due(self.global_step):
                    with throughput.paused("saving"):
                        self.save_checkpoint(name, optional=not control.ending)
        self.checkpointer.close()
        return control.finish(self.global_step, self.total_steps)

    def update(self, control: training.RunControl, batches: list[Batch], num_terms: int) -> dict[str, Any]:
        """One optimizer step on some answers; returns its metrics."""
        # The mean is over all terms of the update, so that its gradient does not depend on the split.
        for batch in batches:
            loss = self.compute_loss(batch) / max(num_terms, 1)
            self.step_metrics.add_loss(loss)
            if self.cfg.optimizer_in_bwd:  # the backward pass changes weights, so that all ranks must agree before
                metrics = control.synchronize(self.global_step + 1, self.step_metrics)
                accepted = self.guard.accepts(self.global_step + 1, metrics)
                self.optimizer.skip_step = not accepted
            loss.backward()
        run_pre_optimizer_hooks(self.model)
        if not self.cfg.optimizer_in_bwd:
            grad_norm = training.clip_grad_norm_(self.model.parameters(), self.cfg.clip_grad_norm)
            metrics = control.synchronize(self.global_step + 1, self.step_metrics, grad_norm)
            accepted = self.guard.accepts(self.global_step + 1, metrics)
        if accepted:
            self.optimizer.step()
            run_post_optimizer_hooks(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Means over the validation prompts of the likeliest answers' rewards."""
        with self.step_metrics.validation() as means:
            for batches in self.loader_val:
                means.add(self.sample(batches, 1, greedy=True).figures())
        return means.over(self.dims)

    def training_state(self) -> dict[str, Any]:
        """Everything besides the weights that decides the next step."""
        state = {
            "optimizer": self.optimizer,
            "loader": self.loader,
            "rng": training.RNGState(),
            "guard": self.guard,
            "best": self.best,
            "progress": {"seed": self.seed, "global_step": self.global_step, "total_steps": self.total_steps},
        }
        return state if self.lr_scheduler is None else {**state, "lr_scheduler": self.lr_scheduler}

    def save_checkpoint(self, name: str, *, optional: bool) -> None:
        """Write the model (adapters: merged, too, after an epoch) and, unless training is over, what a resume needs."""
        state = self.training_state() if self.global_step < self.total_steps else None
        merge = not self.cfg.save_adapter_weights_only and (state is None or name.startswith("epoch"))
        contents = training.checkpoint_contents(self.model, merge=merge)
        behind = self.cfg.enable_async_checkpointing and optional
        self.checkpointer.save(
            name, self.model, contents=contents, state=state, cfg=self.cfg, async_save=behind, optional=optional
        )

    def cleanup(self) -> None:
        """Close what was opened, and leave the process group."""
        try:
            self.checkpointer.close()
        finally:
            self.metric_logger.close()
            self.dims.close()


@config.parse
@training.watched
def recipe_main(cfg: Settings) -> int:
    """Run the recipe with checked settings."""
    training.check_run(cfg)
    recipe = PPORecipe(cfg)
    recipe.setup(cfg)
    report = training.RunReport(recipe)
    try:
        return report.end(recipe.train())
    finally:
        recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
