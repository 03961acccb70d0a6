"""LoRA fine-tuning of a decoder on several devices: the weights stay frozen, small adapters are trained.

For models that do not fit on one device, or are too slow there. They are sharded over all devices (FSDP2); layers and
their adapters can be split with tensor parallel, long sequences with context parallel. See docs/distributed.rst for the
choice. The loop is that of lora_finetune_single_device: the same examples per step give the same losses. Runs on GPUs
and on CPUs. ``quantizer`` enables quantization-aware training.

    tune run --nproc-per-node 2 lora_finetune_distributed --config llama3_2/1B_lora epochs=2
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch

from torchtune import checkpoints, config, datasets, estimate, evaluation, reports, supervision, training, utils
from torchtune.config import Component, ObjectPath, PositiveInt, Range, RuntimeArgs
from torchtune.data import Batch, BatchLoader
from torchtune.modules.conversion import apply_conversions, run_post_optimizer_hooks, run_pre_optimizer_hooks
from torchtune.modules.loss import setup_loss
from torchtune.modules.peft import require_adapters
from torchtune.training import quantization


@dataclass(kw_only=True)
class Settings:
    """Settings of LoRA fine-tuning on several devices."""

    # Builder of the model with adapters, for example torchtune.models.llama3_2.lora_llama3_2_1b.
    model: Component
    # Tokenizer of the model, with its chat template.
    tokenizer: Component
    # Checkpointer: source of the weights, and format of the saved checkpoints.
    checkpointer: config.CheckpointerComponent
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
    # Scores of greedy answers in each validation, logged as val_<score>: exact, number, json, regex:PATTERN, math, or
    # functions, by dotted path as in tune eval, or by name in the recipe's file.
    scores: list[Annotated[str, ObjectPath(required=False)]] = field(default_factory=list)
    # Number of rows of dataset_val, from the first on, that are answered for scores.
    scores_rows: PositiveInt = 16
    # Maximum number of tokens of an answer that is scored.
    scores_max_new_tokens: PositiveInt = 128

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
    # Tensor parallel size, best within one machine.
    tensor_parallel_dim: PositiveInt = 1
    # Tensor parallel plan; null: the default of the model's family.
    tensor_parallel_plan: Annotated[Component | None, RuntimeArgs("model")] = None
    # Context parallel size: sequences are split over these ranks.
    context_parallel_dim: PositiveInt = 1
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
    # Quantizer of quantization-aware training, such as
    # torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer; the last checkpoint is also saved quantized.
    quantizer: Component | None = None
    # Number of steps before fake quantization starts; null: from the first step.
    fake_quant_after_n_steps: PositiveInt | None = None
    # Enlarge the embedding if the tokenizer has more tokens than the checkpoint.
    resize_token_embeddings: bool = False

    # Visit the examples of each epoch in random order.
    shuffle: bool = True
    # Collate function; the default is padding-free.
    collate_fn: Annotated[str, ObjectPath()] = "torchtune.data.collate_documents"
    # Folder of cached features of images, which a frozen vision tower computes once; null: in every epoch.
    image_cache: str | None = None
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
        "low_cpu_ram": "weights are always streamed into the model",
        "context_parallel_rotate_method": "heads are exchanged for positions, whatever it says",
    }

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (setting, error and remedy) for invalid combinations of settings."""
        yield from estimate.check_settings(self)


class LoRAFinetuneRecipeDistributed:
    """Training of adapters of a frozen model on several devices."""

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self.device = utils.get_device(cfg.device)
        self.dims = training.ParallelDims.start(
            self.device,
            dp_replicate=cfg.data_parallel_replicate_dim,
            dp_shard=cfg.data_parallel_shard_dim,
            cp=cfg.context_parallel_dim,
            tp=cfg.tensor_parallel_dim,
            ep=cfg.expert_parallel_dim,
        )
        self.log = utils.get_run_logger(cfg.output_dir, cfg.log_level)
        cfg.dtype, self.dtype = training.choose_dtype(cfg.dtype, self.device)
        self.checkpointer = config.instantiate(cfg.checkpointer)
        self.quantizer = config.instantiate(cfg.quantizer)
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
        self.loss_fn = setup_loss(config.instantiate(cfg.loss), self.model)
        self.class_scores = training.setup_classification(self.model, self.loss_fn, self.loader, self.loader_val)
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
        self.step_metrics = supervision.StepMetrics(["token_accuracy", "entropy"])
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
        self.scores = evaluation.ValidationScores(
            cfg.scores,
            self.loader_val,
            self.model,
            self.tokenizer,
            self.dims,
            rows=cfg.scores_rows,
            max_new_tokens=cfg.scores_max_new_tokens,
        )
        state = self.training_state()
        checkpoints.check_training_state(state)
        if self.resume_point is not None:
            self.checkpointer.resume(self.resume_point, self.model, state)
            self.global_step = state["progress"]["global_step"]
            self.log.info(f"Resuming from {self.resume_point.path} at step {self.global_step} of {self.total_steps}.")
        training.cache_images(self.model, self.tokenizer, cfg.image_cache, self.dims)
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

    def setup_model(self, cfg: Settings) -> torch.nn.Module:
        """Build on the meta device, convert, parallelize, load and wrap: each rank reads only its shards."""
        converters = [config.instantiate(converter) for converter in cfg.model_converters]
        if self.quantizer is not None:
            converters.append(
                quantization.fake_quantization(
                    self.quantizer, cfg.fake_quant_after_n_steps, lambda: self.global_step, self.total_steps
                )
            )
        with training.set_default_dtype(self.dtype), torch.device("meta"):
            model = config.instantiate(cfg.model)
            apply_conversions(model, converters)
        require_adapters(model)
        contents = checkpoints.checkpoint_contents(model, merge=not cfg.save_adapter_weights_only)
        self.checkpointer.check_contents(model, contents=contents, tokenizer=self.tokenizer)
        if cfg.resize_token_embeddings:
            training.add_token_rows(model, self.tokenizer)
        training.parallelize(
            model,
            self.dims,
            device=self.device,
            cpu_offload=cfg.fsdp_cpu_offload,
            reshard_after_forward=cfg.fsdp_reshard_after_forward,
            custom_sharded_layers=cfg.custom_sharded_layers,
            tensor_parallel_plan=cfg.tensor_parallel_plan and partial(config.instantiate, cfg.tensor_parallel_plan),
        )
        self.checkpointer.load_model(model, device="cpu" if cfg.fsdp_cpu_offload else self.device)
        training.fit_vocabulary(model, self.tokenizer)
        training.checkpoint_activations(model, cfg.enable_activation_checkpointing, cfg.ac_mode, cfg.ac_option)
        if cfg.compile:
            training.compile_model(model)
        return model

    def setup_loader(self, dataset: Any, batch_size: int, *, training_data: bool = False) -> BatchLoader:
        """Build this rank's loader of a dataset; the order depends only on the seed and the epoch."""
        return BatchLoader(
            datasets.instantiate_dataset(dataset, self.tokenizer, estimate.context_length(self.cfg)),
            batch_size=batch_size,
            collate_fn=self.dims.collate(datasets.instantiate_collate(self.cfg.collate_fn, self.tokenizer)),
            shuffle=self.cfg.shuffle and training_data,
            seed=self.seed,
            accumulation_steps=self.cfg.gradient_accumulation_steps if training_data else 1,
            max_steps_per_epoch=self.cfg.max_steps_per_epoch if training_data else None,
            rank=self.dims.data_rank,
            world_size=self.dims.data_size,
        )

    def compute_loss(self, batch: Batch) -> torch.Tensor:
        """Sum the loss over the labels of a batch; returns a scalar."""
        batch = batch.to(self.device, non_blocking=True)
        with self.offloading, self.step_metrics.by_source(batch) as row_losses:
            hidden = self.model(**batch.model_inputs(), output="hidden")
            metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
            total, _ = self.loss_fn.sum_and_count(
                hidden,
                batch.labels,
                self.model.output,
                index=batch.label_index,
                weights=batch.label_weights,
                row_losses=row_losses,
                metrics=metrics,
            )
            self.step_metrics.log_mean(metrics)  # accuracy and entropy of the predictions
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
                # The mean is over all labels (pairs, …) of the step, so that its gradient does not depend on the split.
                for batch in step.batches:
                    loss = self.compute_loss(batch) / (step.num_terms or 1)
                    self.step_metrics.add_loss(loss)
                    if cfg.optimizer_in_bwd:  # backward updates the weights, so all ranks must agree before it
                        metrics = control.synchronize(self.global_step + 1, self.step_metrics)
                        accepted = self.guard.accepts(self.global_step + 1, metrics)
                        self.optimizer.skip_step = not accepted
                    self.scaler.scale(loss).backward()
                run_pre_optimizer_hooks(self.model)
                if not cfg.optimizer_in_bwd:
                    grad_norm = training.clip_grad_norm_(
                        self.model.parameters(), cfg.clip_grad_norm, self.scaler.factor
                    )
                    metrics = control.synchronize(self.global_step + 1, self.step_metrics, grad_norm)
                    accepted = self.guard.accepts(self.global_step + 1, metrics)
                if accepted:
                    self.optimizer.step()
                    run_post_optimizer_hooks(self.model)
                self.optimizer.zero_grad(set_to_none=True)
                metrics["lr"] = training.get_lr(self.optimizer)
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step()
                self.global_step += 1
                throughput.step(processed=step.num_tokens // self.dims.world_size, trained=step.num_labels)
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

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the mean loss and other metrics of the validation data, and scores of classes and of answers."""
        self.model.eval()
        with self.step_metrics.validation() as means, self.class_scores.recorded():
            for (batch,) in self.loader_val:
                means.add({"loss": (self.compute_loss(batch), batch.num_terms)})
        self.model.train()
        return means.over(self.dims) | self.class_scores.over(self.dims) | self.scores.measure()

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
        """Save the adapter, the merged model after an epoch and, unless training is finished, the resume state."""
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
        if self.quantizer is not None and state is None and merge:
            self.checkpointer.save_quantized(name, self.model, self.quantizer)

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
    recipe = LoRAFinetuneRecipeDistributed(cfg)
    recipe.setup(cfg)
    try:
        with recipe.report as report:
            report.start(recipe.global_step, compute_loss=recipe.compute_loss)
            code = recipe.train()
            return report.end(recipe.global_step, code, compute_loss=recipe.compute_loss)
    finally:
        recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
