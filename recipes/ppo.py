"""Reinforcement learning from a reward model: PPO, with a value model.

A step samples an answer to each prompt. The reward model scores it, every token is penalized for its log-ratio to the
reference, and the value model predicts the return: the policy raises the probability of tokens with a positive
advantage. Policy and value model are trained and saved together, the value model in the subfolder value; a resumed run
samples the same answers again. Batches are padding-free; every answer is written to rollouts.jsonl. With adapters, only
they are trained in the policy. Runs on one device, or on several with all four models sharded. See docs/ppo.rst for
when to use it and the metrics to watch.

    tune run ppo --config smol/135M_full_ppo_single_device kl_coeff=0.05
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch

from torchtune import checkpoints, config, datasets, estimate, reports, rlhf, supervision, training, utils
from torchtune.config import Component, ObjectPath, PositiveInt, Range
from torchtune.data import Batch, BatchLoader
from torchtune.modules.conversion import apply_conversions, run_post_optimizer_hooks, run_pre_optimizer_hooks
from torchtune.modules.peft import has_adapters


@dataclass(kw_only=True)
class Settings:
    """Settings of PPO."""

    # Builder of the policy. With adapters, only they are trained, otherwise all weights.
    policy_model: Component
    # Builder of the reward model and of the value model: torchtune.modules.classifier_model with num_classes=1.
    reward_and_value_model: Component
    # Tokenizer of the model, with its chat template.
    tokenizer: Component
    # Checkpointer: source of the weights, and format of the saved checkpoints.
    checkpointer: config.CheckpointerComponent
    # Checkpointer of the value model's initial weights, usually the reward model's.
    value_checkpointer: Component
    # Checkpointer of the reward model, which is frozen.
    reward_checkpointer: Component
    # Checkpointer of the reference model, usually the policy's initial weights; it is frozen.
    ref_policy_checkpointer: Component
    # Training dataset; several datasets are concatenated.
    dataset: config.DatasetComponent
    # Folder for checkpoints, logs and the resolved config.
    output_dir: str
    # Resume from the newest complete checkpoint in output_dir.
    resume_from_checkpoint: bool = False

    # Number of passes over the training data.
    epochs: PositiveInt = 1
    # Maximum number of optimizer steps per epoch; null: the whole epoch.
    max_steps_per_epoch: PositiveInt | None = None
    # Number of optimizer steps of the run, whatever the epochs: data are repeated or cut; null: epochs.
    max_steps: PositiveInt | None = None
    # Examples (or packs) per micro-batch.
    batch_size: PositiveInt = 2
    # Micro-batches per optimizer step.
    gradient_accumulation_steps: PositiveInt = 1
    # Optimizer of the trained parameters.
    optimizer: config.OptimizerComponent
    # Learning rate scheduler, stepped after every optimizer step.
    lr_scheduler: config.SchedulerComponent | None = None
    # Loss: the sum over labeled tokens (pairs, …), divided by their number in the whole step.
    loss: config.LossComponent
    # Maximum gradient norm; larger gradients are scaled down to it.
    clip_grad_norm: Annotated[float | None, Range(above=0)] = None

    # Total number of answers per device, one per prompt; null: the prompts of all epochs.
    num_steps: PositiveInt | None = None
    # Answers sampled and scored at the same time, which limits the memory of the KV cache; null: all of a step.
    forward_batch_size: PositiveInt | None = None
    # Maximum number of tokens per answer.
    max_generated_tokens: PositiveInt = 256
    # Sampling temperature, also used in the loss.
    temperature: Annotated[float, Range(above=0)] = 1.0
    # Must be null: the loss's probability ratios need samples from the full distribution.
    top_k: int | None = None
    # Tokens that end an answer; null: the tokenizer's stop tokens.
    stop_token_ids: list[int] | None = None
    # Minimum number of tokens: shorter answers get reward_penalty; null: no minimum.
    min_response_length: PositiveInt | None = None
    # Give reward_penalty to answers that do not end within max_generated_tokens.
    penalise_no_eos: bool = True
    # Score of a penalized answer.
    reward_penalty: float = -3.0
    # Weight of the per-token log-ratio to the reference, a penalty in the rewards.
    kl_coeff: Annotated[float, Range(min=0)] = 0.01
    # Divide the token rewards by their standard deviation.
    whiten_rewards: bool = False
    # Discount factor of later rewards.
    gamma: Annotated[float, Range(min=0, max=1)] = 1.0
    # GAE λ: from one-step (0) to full returns (1).
    lmbda: Annotated[float, Range(min=0, max=1)] = 0.95
    # Number of passes over the answers of a step.
    ppo_epochs: PositiveInt = 1
    # Answers per optimizer step and device; null: all answers of a step.
    ppo_batch_size: PositiveInt | None = None
    # Number of steps between two tables of answers in the log; null: none.
    show_samples_every_n_steps: PositiveInt | None = 10

    # Device to run on: cuda, cpu, mps …; null: the best one.
    device: str | None = None
    # Dtype of weights and activations; null: the best one that the device computes fast.
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    # Seed of all random numbers; null draws a seed and writes it to the saved config.
    seed: Annotated[int | None, Range(min=0)] = None
    # Logger of the metrics.
    metric_logger: Component
    # Number of steps between two records of the metrics.
    log_every_n_steps: PositiveInt = 1

    # Recompute activations in the backward pass to save memory.
    enable_activation_checkpointing: bool = False
    # Recompute activations of every layer (full), or as set by ac_option (selective).
    ac_mode: Literal["full", "selective"] | None = None
    # n recomputes every n-th layer; op saves attention and every second matrix product in all layers.
    ac_option: int | str | None = None
    # Offload activations to host memory between forward and backward (CUDA, with activation checkpointing).
    enable_activation_offloading: bool = False
    # Compile every layer and the loss.
    compile: bool = False
    # Precision of updates to bf16 weights: stochastic_rounding (no extra memory), fp32_master, or param_dtype (bf16).
    optimizer_precision: Literal["stochastic_rounding", "fp32_master", "param_dtype"] = "stochastic_rounding"
    # Step each parameter in the backward pass as soon as its gradient is ready, and free the gradient.
    optimizer_in_bwd: bool = False

    # Validation dataset, evaluated every run_val_every_n_steps.
    dataset_val: config.DatasetComponent | None = None
    # Examples per validation batch; null: batch_size.
    batch_size_val: PositiveInt | None = None
    # Number of steps between two validations, a fraction of the run (0.25), or epoch; null: no validation.
    run_val_every_n_steps: config.StepInterval | None = None
    # Save and keep the best checkpoint by this validation metric, such as val_loss (max:val_x if higher is better).
    keep_best: str | None = None
    # Number of validations without improvement (of keep_best, or val_loss) that end the run; null: no early stopping.
    early_stopping_patience: PositiveInt | None = None

    # Number of steps between two checkpoints, with one more at the end, or a fraction of the run; null: one per epoch.
    save_every_n_steps: config.StepInterval | None = None
    # Minutes between two additional checkpoints; null: none.
    save_every_n_minutes: Annotated[float | None, Range(above=0)] = None
    # Save checkpoints in the background, from a copy in host memory.
    enable_async_checkpointing: bool = False
    # Save only the adapter, not the merged model.
    save_adapter_weights_only: bool = False

    # Number of replicas of the model, each with different examples (HSDP if parameters are sharded, too).
    data_parallel_replicate_dim: PositiveInt = 1
    # Number of ranks that FSDP shards a replica over, each with different examples; -1: the remaining ranks.
    data_parallel_shard_dim: Annotated[int, Range(min=-1)] = -1
    # Expert parallel size, as part of the shards: experts are split over these ranks, tokens are sent by all-to-all.
    expert_parallel_dim: PositiveInt = 1
    # Offload parameters, gradients and optimizer states to host memory.
    fsdp_cpu_offload: bool = False
    # Reshard the parameters of a layer after its forward pass; False communicates less, but needs more memory.
    fsdp_reshard_after_forward: bool = True
    # Modules to shard separately, in addition to the layers, for example [tok_embeddings, output].
    custom_sharded_layers: list[str] | None = None

    # Conversions of the model (adapters, quantization …), applied in order before the weights are loaded.
    model_converters: list[Component] = field(default_factory=list)
    # Enlarge the embedding if the tokenizer has more tokens than the checkpoint.
    resize_token_embeddings: bool = False

    # Visit the examples of each epoch in random order.
    shuffle: bool = True
    # Collate function of prompts.
    collate_fn: Annotated[str, ObjectPath()] = "torchtune.rlhf.collate_prompts"
    # Skip steps with a non-finite loss or gradient; this many in a row end the run.
    max_skipped_steps: PositiveInt = 10
    # Skip steps with a loss this many standard deviations above the recent mean; null: no limit.
    loss_spike_threshold: Annotated[float | None, Range(above=0)] = None
    # Watchdog timeout: minutes without progress after which the run ends and names the stalled rank; null: none.
    hang_timeout_minutes: Annotated[float | None, Range(above=0)] = 30.0
    # Argument of torch.set_deterministic_debug_mode.
    cudnn_deterministic_mode: int | str | None = None
    # Log peak memory with the metrics.
    log_peak_memory_stats: bool = True
    # Log level of the terminal.
    log_level: Literal["DEBUG", "INFO", "WARN", "WARNING", "ERROR"] = "INFO"
    # Profiler for a window of steps.
    profiler: Component | None = None

    retired: ClassVar[dict[str, str]] = {
        "enable_kv_cache": "answers are always sampled with a cache",
    }

    @property
    def model(self) -> Component:
        """The policy, under the other recipes' name."""
        return self.policy_model

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (setting, error and remedy) for invalid combinations of settings."""
        yield from estimate.check_settings(self)
        yield from rlhf.check_ppo_settings(self)
        if self.top_k is not None:
            yield "top_k", "changes the distribution that ratios are taken of: set it to null"


class PPORecipe:
    """Training of a policy by the scores of a reward model, together with a value model."""

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
        seed = cfg.seed
        if self.resume_point is not None:
            seed = self.resume_point.progress["seed"]
        self.seed = cfg.seed = training.set_seed(seed, debug_mode=cfg.cudnn_deterministic_mode)
        self.global_step = 0

    def setup(self, cfg: Settings) -> None:
        """Build all objects for training, without training or saving anything."""
        self.tokenizer = config.instantiate(cfg.tokenizer)
        self.loader = self.setup_loader(cfg.dataset, cfg.batch_size, training_data=True)
        self.loader_val = None
        if cfg.dataset_val:
            self.loader_val = self.setup_loader(cfg.dataset_val, cfg.batch_size_val or cfg.batch_size)
        self.total_steps = cfg.max_steps or cfg.epochs * len(self.loader)

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
        self.profiler = supervision.profiler_from_config(cfg.profiler)
        self.step_metrics = supervision.StepMetrics()
        self.scaler = training.LossScaler(self.optimizer, self.dtype)
        self.guard = supervision.StepGuard(
            self.step_metrics,
            self.loader,
            self.dims,
            cfg.output_dir,
            cfg.max_skipped_steps,
            cfg.loss_spike_threshold,
            self.scaler,
            training.DeviceSkips(self.optimizer, self.model),
        )
        self.best = supervision.BestValidation(cfg.output_dir, cfg.keep_best, cfg.early_stopping_patience, self.dims)
        state = self.training_state()
        checkpoints.check_training_state(state)
        if self.resume_point is not None:
            self.checkpointer.resume(self.resume_point, self.model, state)
            self.global_step = state["progress"]["global_step"]
            self.log.info(f"Resuming from {self.resume_point.path} at step {self.global_step} of {self.total_steps}.")
        self.report = reports.RunReport(
            cfg,
            __file__,
            self.dims,
            self.device,
            self.model,
            self.tokenizer,
            self.loader,
            self.loader_val,
            self.checkpointer,
            self.best,
            self.step_metrics,
            self.total_steps,
        )

    def setup_model(self, cfg: Settings) -> torch.nn.ModuleDict:
        """Load policy and value model, set up sampling and scoring, then wrap the trained models."""
        policy = self.load_model(cfg, cfg.policy_model, cfg.model_converters, "policy")
        value = self.load_model(cfg, cfg.reward_and_value_model, [], "value")
        models = torch.nn.ModuleDict({"policy": policy, "value": value})
        contents = checkpoints.checkpoint_contents(models, merge=not cfg.save_adapter_weights_only)
        self.checkpointer.check_contents(models, contents=contents, tokenizer=self.tokenizer)
        training.fit_vocabulary(policy, self.tokenizer)
        self.setup_rollouts(cfg, models)
        for model in models.values():
            training.checkpoint_activations(model, cfg.enable_activation_checkpointing, cfg.ac_mode, cfg.ac_option)
            if cfg.compile:
                training.compile_model(model)
        return models

    def load_model(self, cfg: Settings, builder: Any, converters: list[Any], name: str) -> torch.nn.Module:
        """Build on the meta device, convert and parallelize, then load: each rank reads only its shards."""
        with training.set_default_dtype(self.dtype), torch.device("meta"):
            model = config.instantiate(builder)
            apply_conversions(model, [config.instantiate(converter) for converter in converters])
        if cfg.resize_token_embeddings and name in ("policy", "reference"):
            folder = self.checkpointer.store.source(name).checkpoint_dir
            training.add_token_rows(model, self.tokenizer, folder)
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
        if is_frozen:
            model.requires_grad_(False).eval()
        return model

    def setup_loader(self, dataset: Any, batch_size: int, *, training_data: bool = False) -> BatchLoader:
        """Build this rank's loader of prompts; the order depends only on the seed and the epoch."""
        rows = datasets.instantiate_dataset(dataset, self.tokenizer, estimate.context_length(self.cfg))
        prompts = rlhf.numbered_prompts(rows, self.tokenizer)
        max_steps = None
        if training_data:
            max_steps = rlhf.steps_per_epoch(self.cfg.num_steps, len(prompts) // self.dims.data_size, batch_size)
            max_steps = max_steps or self.cfg.max_steps_per_epoch
        return BatchLoader(
            prompts,
            batch_size=batch_size,
            collate_fn=self.dims.collate(datasets.instantiate_collate(self.cfg.collate_fn, self.tokenizer)),
            shuffle=self.cfg.shuffle and training_data,
            seed=self.seed,
            max_steps_per_epoch=max_steps,
            rank=self.dims.data_rank,
            world_size=self.dims.data_size,
        )

    def setup_rollouts(self, cfg: Settings, models: torch.nn.ModuleDict) -> None:
        """Set up the sampler, the rewards, the loss and the reference."""
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
        all_models = {**models, "reference": self.reference, "reward": reward}
        rlhf.check_ppo_models(all_models, self.checkpointer, self.tokenizer)
        shortest_context = min(all_models.values(), key=lambda model: model.max_seq_len)
        for loader in filter(None, (self.loader, self.loader_val)):
            rlhf.check_prompts(loader.dataset, self.sampler, shortest_context, 1 + len(self.reward_model.closing))
        self.record = rlhf.RolloutRecord(cfg.output_dir, self.tokenizer, self.dims, cfg.show_samples_every_n_steps)

    def sample(self, batches: list[Batch], num_samples: int, *, greedy: bool = False) -> rlhf.ScoredRollouts:
        """Sample and score answers, which depend only on the seed, the step and the row."""
        prompts = []
        for batch in batches:
            prompts += batch.prompts
        seeds = None
        if not greedy:
            seeds = [rlhf.prompt_seed(self.seed, self.global_step, prompt.number) for prompt in prompts]
        rollouts = self.sampler([prompt.tokens for prompt in prompts], num_samples, seeds)
        return rlhf.judge_rollouts(prompts, rollouts, self.reward_model, self.tokenizer)

    def make_experience(self, prompts: list[Batch]) -> tuple[Iterable[tuple[list[Batch], int]], int, int]:
        """Sample and score answers; return (micro-batches, labels) per update, and token and label counts."""
        cfg = self.cfg
        scored = self.sample(prompts, num_samples=1)
        tokens = rlhf.evaluate_rollouts(
            scored, self.reference, self.model["value"], cfg.temperature, cfg.forward_batch_size, dims=self.dims
        )
        estimates = rlhf.ppo_advantages(
            tokens, scored, cfg.kl_coeff, cfg.gamma, cfg.lmbda, cfg.whiten_rewards, dims=self.dims
        )
        self.step_metrics.log_mean(scored.figures() | estimates.figures)
        (num_labels,) = self.dims.sum(int(tokens.mask.sum()))
        means = estimates.advantages.sum(1, keepdim=True) / tokens.mask.sum(1, keepdim=True).clamp(min=1)
        self.record.write(self.global_step + 1, scored, means, num_labels, self.metric_logger)
        updates = rlhf.ppo_updates(
            scored,
            tokens,
            estimates,
            cfg.ppo_epochs,
            cfg.ppo_batch_size,
            cfg.gradient_accumulation_steps,
            seeds=(self.seed, self.global_step),
            device=self.device,
            dims=self.dims,
        )
        num_tokens = sum(len(rollout.tokens) - 1 for rollout in scored.rollouts)
        return updates, num_tokens, num_labels

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Sum the loss of policy and value model over the tokens of a batch; returns a scalar."""
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
        """Train for the remaining steps, with logging, validation and checkpoints; return the exit code."""
        cfg = self.cfg
        self.model.train()
        throughput = supervision.Throughput(model=self.model, dims=self.dims, device=self.device, step=self.global_step)
        control = supervision.RunControl(
            self.dims,
            cfg.output_dir,
            cfg.save_every_n_steps,
            cfg.save_every_n_minutes,
            best=self.best,
            total_steps=self.total_steps,
            validate_every=cfg.run_val_every_n_steps,
        )
        training.reset_memory_stats(self.device)
        with (
            control,
            supervision.watch_run(cfg, self.dims, throughput, cfg.hang_timeout_minutes),
            supervision.ProgressBar(total=self.total_steps, initial=self.global_step) as progress,
            self.profiler as profiler,
        ):
            for step in control.steps(self.loader, cfg.epochs, throughput):
                with throughput.paused("sampling"):
                    updates, num_tokens, num_labels = self.make_experience(step.batches)
                metrics = {}
                for batches, num_terms in updates:
                    metrics = metrics | self.update(control, batches, num_terms)
                metrics["lr"] = training.get_lr(self.optimizer)
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step()
                self.global_step += 1
                throughput.step(processed=num_tokens, trained=num_labels)
                profiler.step()

                if self.global_step % cfg.log_every_n_steps == 0:
                    metrics |= self.guard.metrics() | throughput.metrics()
                    if cfg.log_peak_memory_stats:
                        metrics |= training.get_memory_stats(self.device)
                    self.metric_logger.log_dict(metrics, step=self.global_step)
                    progress.update_metrics(metrics)
                progress.advance(self.global_step)
                if control.validation_due(self.global_step):
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

    def update(self, control: supervision.RunControl, batches: list[Batch], num_terms: int) -> dict[str, Any]:
        """Do one optimizer step on some answers; return its metrics."""
        # The mean is over all terms of the update, so that its gradient does not depend on the split.
        for batch in batches:
            loss = self.compute_loss(batch) / max(num_terms, 1)
            self.step_metrics.add_loss(loss)
            if self.cfg.optimizer_in_bwd:  # backward updates the weights, so all ranks must agree before it
                metrics = control.synchronize(self.global_step + 1, self.step_metrics)
                accepted = self.guard.accepts(self.global_step + 1, metrics)
                self.optimizer.skip_step = not accepted
            self.scaler.scale(loss).backward()
        run_pre_optimizer_hooks(self.model)
        if not self.cfg.optimizer_in_bwd:
            grad_norm = training.clip_grad_norm_(self.model.parameters(), self.cfg.clip_grad_norm, self.scaler.factor)
            metrics = control.synchronize(self.global_step + 1, self.step_metrics, grad_norm)
            accepted = self.guard.accepts(self.global_step + 1, metrics)
        if accepted:
            self.optimizer.step()
            run_post_optimizer_hooks(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return mean rewards of greedy answers to the validation prompts."""
        with self.step_metrics.validation() as means:
            for batches in self.loader_val:
                means.add(self.sample(batches, 1, greedy=True).figures())
        return means.over(self.dims)

    def training_state(self) -> dict[str, Any]:
        """Return the resume state, without the weights."""
        state = {
            "optimizer": self.optimizer,
            "loader": self.loader,
            "rng": training.RNGState(),
            "guard": self.guard,
            "best": self.best,
            "progress": {"seed": self.seed, "global_step": self.global_step, "total_steps": self.total_steps},
        }
        if self.lr_scheduler is not None:
            state["lr_scheduler"] = self.lr_scheduler
        return state

    def save_checkpoint(self, name: str, *, optional: bool) -> None:
        """Save the model (adapters also merged, after an epoch) and, unless training is finished, the resume state."""
        state = None
        if self.global_step < self.total_steps:
            state = self.training_state()
        merge = not self.cfg.save_adapter_weights_only and (state is None or name.startswith("epoch"))
        contents = checkpoints.checkpoint_contents(self.model, merge=merge)
        async_save = self.cfg.enable_async_checkpointing and optional
        self.checkpointer.save(
            name,
            self.model,
            contents=contents,
            state=state,
            cfg=self.cfg,
            tokenizer=self.tokenizer,
            async_save=async_save,
            optional=optional,
        )

    def cleanup(self) -> None:
        """Close files and loggers, and leave the process group."""
        try:
            self.checkpointer.close()
        finally:
            self.metric_logger.close()
            self.dims.close()


@config.parse
@supervision.watched
def recipe_main(cfg: Settings) -> int:
    """Run the recipe with checked settings."""
    estimate.check_run(cfg)
    recipe = PPORecipe(cfg)
    recipe.setup(cfg)
    try:
        with recipe.report as report:
            report.start(recipe.global_step, sample=recipe.sample)
            code = recipe.train()
            return report.end(recipe.global_step, code, sample=recipe.sample)
    finally:
        recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
