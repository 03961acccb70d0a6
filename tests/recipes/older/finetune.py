"""A recipe as users wrote them against earlier releases: all weights or LoRA, on one device or with FSDP, and DPO."""

import sys
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed._tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from torchtune import config, modules, rlhf, training, utils
from torchtune.config._utils import _get_component_from_path
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_dpo
from torchtune.datasets import ConcatDataset
from torchtune.modules.loss import SFTLoss
from torchtune.modules.peft import (
    AdapterModule,
    disable_adapter,
    get_adapter_params,
    get_adapter_state_dict,
    get_lora_module_names,
    get_merged_lora_ckpt,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.rlhf import ChosenRejectedOutputs
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress
from torchtune.training.lr_schedulers import get_lr
from torchtune.training.quantization import (
    _get_disable_fake_quant,
    _get_enable_fake_quant,
    get_quantizer_mode,
    swap_lora_linear_with_qat,
)

log = utils.get_logger("DEBUG")


class OlderRecipe(FTRecipeInterface):
    """Fine-tuning, through a checkpointer on one device and through a CheckpointClient on several."""

    def __init__(self, cfg: DictConfig) -> None:
        self._device = utils.get_device(device=cfg.device)
        self._dtype = training.get_dtype(cfg.dtype, device=self._device)
        self._is_distributed = training.is_distributed()
        self._enable_async_checkpointing = cfg.get("enable_async_checkpointing", False)
        if self._is_distributed:
            init_process_group(
                training.get_distributed_backend(cfg.device, offload_ops_to_cpu=self._enable_async_checkpointing)
            )
        self.world_size, self.rank = utils.get_world_size_and_rank()
        self._is_rank_zero = self.rank == 0
        self.parallel_dims = training.ParallelDims(
            dp_replicate=cfg.get("data_parallel_replicate_dim", 1),
            dp_shard=cfg.get("data_parallel_shard_dim", -1),
            tp=cfg.get("tensor_parallel_dim", 1),
            cp=cfg.get("context_parallel_dim", 1),
            world_size=self.world_size,
        )
        self.world_mesh = self.parallel_dims.build_mesh(device_type=cfg.device) if self._is_distributed else None
        self.dp_degree, self.dp_rank = 1, 0
        if self.parallel_dims.dp_enabled:
            dp_mesh = self.world_mesh["dp"]
            self.dp_degree = dp_mesh.size()
            self.dp_rank = dp_mesh.get_local_rank()
        self.seed = training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.epochs_run, self.global_step, self._skip_batches = 0, 0, 0
        self.total_epochs = cfg.epochs
        self.max_steps_per_epoch = cfg.max_steps_per_epoch
        self.save_every_n_steps = cfg.get("save_every_n_steps")
        self._resume_from_checkpoint = cfg.resume_from_checkpoint
        self._log_every_n_steps = cfg.get("log_every_n_steps", 1)
        self._log_peak_memory_stats = cfg.get("log_peak_memory_stats", False)
        if self._log_peak_memory_stats and self._device.type not in training.VALID_BACKENDS_FOR_MEMORY_STATS:
            self._log_peak_memory_stats = False
        self._gradient_accumulation_steps = cfg.gradient_accumulation_steps
        self._optimizer_in_bwd = cfg.get("optimizer_in_bwd", False)
        self._clip_grad_norm = cfg.get("clip_grad_norm", None)
        self._save_adapter_weights_only = cfg.get("save_adapter_weights_only", False)
        self._fake_quant_after_n_steps = cfg.get("fake_quant_after_n_steps", None)
        self._is_lora = "lora_rank" in cfg.model
        self._adapter_config = None
        if self._is_lora:
            modules_of_lora = (list(cfg.model.lora_attn_modules), cfg.model.apply_lora_to_mlp)
            self._adapter_config = {
                "r": cfg.model.lora_rank,
                "lora_alpha": cfg.model.lora_alpha,
                "target_modules": get_lora_module_names(
                    *modules_of_lora, getattr(cfg.model, "apply_lora_to_output", False)
                ),
                "peft_type": "LORA",
            }
        self._checkpoint_client = CheckpointClient(cfg) if self._is_distributed else None

    def load_checkpoint(self, cfg_checkpointer: DictConfig) -> dict[str, Any]:
        if self._checkpoint_client is not None:
            return self._checkpoint_client.load_base_checkpoint()
        self._checkpointer = config.instantiate(cfg_checkpointer, should_load_recipe_state=self._resume_from_checkpoint)
        return self._checkpointer.load_checkpoint()

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        self.epochs_run = ckpt_dict[training.EPOCHS_KEY]
        assert self.seed == ckpt_dict[training.SEED_KEY]
        assert self.total_epochs == ckpt_dict[training.TOTAL_EPOCHS_KEY]
        if self._checkpoint_client is None:
            assert self.max_steps_per_epoch == ckpt_dict[training.MAX_STEPS_KEY]
        else:
            self.global_step = ckpt_dict[training.STEPS_KEY]
            self._skip_batches = ckpt_dict.get(training.DATALOADER_KEY, {}).get("batches", 0)

    def setup(self, cfg: DictConfig) -> None:
        if self._is_rank_zero:
            self._metric_logger = config.instantiate(cfg.metric_logger)
            self._metric_logger.log_config(cfg)
        utils.log_rank_zero(log, "Loading the base checkpoint.")
        modules.common_utils._use_low_cpu_ram = cfg.get("low_cpu_ram", False)
        checkpoint_dict = self.load_checkpoint(cfg_checkpointer=cfg.checkpointer)
        self._tokenizer = config.instantiate(cfg.tokenizer)
        self._model = self._setup_model(cfg, checkpoint_dict)
        self._optimizer = self._setup_optimizer(cfg.optimizer, checkpoint_dict.get(training.OPT_KEY))
        if self._resume_from_checkpoint:
            if self._enable_async_checkpointing:
                checkpoint_dict = self._checkpoint_client.load_distributed_checkpoint(
                    self._model,
                    self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer,
                    adapter_config=self._adapter_config,
                )
            self._update_recipe_state(checkpoint_dict)
        self._loss_fn = config.instantiate(cfg.loss)
        if isinstance(self._loss_fn, SFTLoss):
            self._loss_fn.set_model_output(self._model)
        self._dataloader = self._setup_data(cfg)
        self._steps_per_epoch = len(self._dataloader) // self._gradient_accumulation_steps
        if self.max_steps_per_epoch is not None:
            self._steps_per_epoch = min(self._steps_per_epoch, self.max_steps_per_epoch)
        if self._checkpoint_client is None:
            self.global_step = self.epochs_run * self._steps_per_epoch
        self._lr_scheduler = None
        if cfg.get("lr_scheduler", None) is not None:
            self._lr_scheduler = config.instantiate(
                cfg.lr_scheduler,
                self._optimizer,
                num_training_steps=self.total_epochs * self._steps_per_epoch,
                last_epoch=self.global_step - 1,
            )
        self.context_parallel_manager = training.get_context_parallel_manager(
            enabled=self.parallel_dims.cp_enabled,
            rotate_method=cfg.get("context_parallel_rotate_method", "allgather"),
            world_mesh=self.world_mesh,
            model=self._model,
        )
        self.train_context = training.get_train_context(
            enable_loss_parallel=self.parallel_dims.tp_enabled
            and getattr(self._loss_fn, "tp_requires_loss_parallel_ctx_manager", False)
        )
        self._profiler, _ = config.instantiate(cfg[training.PROFILER_KEY])

    def _setup_model(self, cfg: DictConfig, checkpoint_dict: dict[str, Any]) -> torch.nn.Module:
        with training.set_default_dtype(self._dtype), torch.device("meta") if self._is_distributed else self._device:
            model = config.instantiate(cfg.model)
        if self._is_lora:
            set_trainable_params(model, get_adapter_params(model))
        if cfg.get("quantizer", None) is not None:
            quantizer = config.instantiate(cfg.quantizer)
            self._quantizer_mode = get_quantizer_mode(quantizer)
            assert "qat" in self._quantizer_mode
            if self._is_lora:
                activations = quantizer.get_activation_fake_quantize_config()
                swap_lora_linear_with_qat(model, activations, quantizer.get_weight_fake_quantize_config())
            else:
                model = quantizer.prepare(model)
        if self.parallel_dims.tp_enabled:
            model = training.prepare_mha_for_tp(model, self.world_mesh["tp"])
            plan = config.instantiate(cfg.tensor_parallel_plan, model=model, enable_fp8_training=False)
            torch.distributed.tensor.parallel.parallelize_module(model, self.world_mesh["tp"], parallelize_plan=plan)
        if cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        load = model.load_state_dict
        lora_sd = checkpoint_dict.get(training.ADAPTER_KEY)
        if self._is_distributed:
            if self.parallel_dims.dp_shard_enabled or self.parallel_dims.cp_enabled:
                conditions = partial(
                    training.get_shard_conditions, names_to_match=cfg.get("custom_sharded_layers", None)
                )
                training.shard_model(
                    model=model,
                    shard_conditions=[conditions],
                    cpu_offload=False,
                    reshard_after_forward=cfg.get("fsdp_reshard_after_forward", True),
                    dp_mesh=self.world_mesh[("dp_shard_cp",)],
                )
            with training.set_default_dtype(self._dtype), self._device:
                for module in model.modules():
                    if isinstance(module, AdapterModule):
                        module.to_empty(device=self._device)
                        module.initialize_parameters()
                    if hasattr(module, "rope_init"):
                        module.rope_init()
            load = partial(training.load_from_full_model_state_dict, model, device=self._device, cpu_offload=False)
        base_missing, base_unexpected = load(checkpoint_dict[training.MODEL_KEY], strict=not self._is_lora)
        lora_missing, lora_unexpected = load(lora_sd, strict=False) if lora_sd else (None, None)
        if self._is_lora:
            validate_missing_and_unexpected_for_lora(
                state_dict_keys=model.state_dict().keys(),
                base_missing=base_missing,
                base_unexpected=base_unexpected,
                lora_missing=lora_missing,
                lora_unexpected=lora_unexpected,
            )
        training.validate_no_params_on_meta_device(model)
        training.validate_expected_param_dtype(model.named_parameters(), dtype=self._dtype)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(model, False)
        return model

    def _setup_optimizer(self, cfg_optimizer: DictConfig, opt_state_dict: dict[str, Any] | None) -> Any:
        load = partial(training.load_from_full_optimizer_state_dict, self._model)
        if self._optimizer_in_bwd:
            optim_dict = {param: config.instantiate(cfg_optimizer, [param]) for param in self._model.parameters()}
            training.register_optim_in_bwd_hooks(model=self._model, optim_dict=optim_dict)
            self._optim_ckpt_wrapper = training.create_optim_in_bwd_wrapper(model=self._model, optim_dict=optim_dict)
            if opt_state_dict is not None and self._is_distributed:
                for param in opt_state_dict:
                    load(self._optim_ckpt_wrapper.optim_map[param], opt_state_dict[param], self._device)
            elif opt_state_dict is not None:
                self._optim_ckpt_wrapper.load_state_dict(opt_state_dict)
            return None
        optimizer = config.instantiate(cfg_optimizer, self._model.parameters())
        if opt_state_dict is not None and self._is_distributed:
            load(optimizer, opt_state_dict, self._device)
        elif opt_state_dict is not None:
            optimizer.load_state_dict(opt_state_dict)
        return optimizer

    def _collate(self, cfg: DictConfig) -> Any:
        return partial(
            _get_component_from_path(cfg.get("collate_fn", "torchtune.data.padded_collate_sft")),
            padding_idx=self._tokenizer.pad_id,
            ignore_idx=self._loss_fn.ignore_index,
            pad_to_multiple_of=self.parallel_dims.min_seq_len_divisor,
            cp_degree=cfg.get("context_parallel_dim", 1),
        )

    def _setup_data(self, cfg: DictConfig) -> DataLoader:
        nodes = cfg.dataset if isinstance(cfg.dataset, ListConfig) else [cfg.dataset]
        ds = ConcatDataset(datasets=[config.instantiate(node, self._tokenizer) for node in nodes])
        sampler = DistributedSampler(
            ds, num_replicas=self.dp_degree, rank=self.dp_rank, shuffle=cfg.shuffle, seed=self.seed
        )
        return DataLoader(
            dataset=ds, batch_size=cfg.batch_size, sampler=sampler, drop_last=True, collate_fn=self._collate(cfg)
        )

    def _loss_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        with self.activations_handling_ctx:
            outputs = self._model(**batch)
        return self._loss_fn(outputs, labels)

    def save_checkpoint(self, *, epoch: int, full_tensors: bool = True) -> None:
        optimizer = self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer
        if self._checkpoint_client is None:
            self._save_alone(optimizer, epoch)
            return
        self._checkpoint_client.save_checkpoint(
            model=self._model,
            optimizer=optimizer,
            training_progress=TrainingProgress(
                seed=self.seed,
                epochs_run=self.epochs_run,
                total_epochs=self.total_epochs,
                max_steps_per_epoch=self.max_steps_per_epoch,
                steps_run=self.global_step,
                total_training_steps=self.total_epochs * self._steps_per_epoch,
                dataloader_state_dict={"batches": self._batches_run},
            ),
            epoch=epoch,
            adapter_config=self._adapter_config,
            adapter_only=self._save_adapter_weights_only,
            single_device=not self._is_distributed,
            full_tensors=full_tensors,
            dir_prefix="epoch" if self.save_every_n_steps is None else "step",
        )

    def _save_alone(self, optimizer: Any, epoch: int) -> None:
        state_dict = {name: tensor.cpu() for name, tensor in self._model.state_dict().items()}
        ckpt_dict: dict[str, Any] = {training.MODEL_KEY: state_dict}
        intermediate_checkpoint = epoch + 1 < self.total_epochs
        if intermediate_checkpoint:
            ckpt_dict |= {
                training.OPT_KEY: optimizer.state_dict(),
                training.SEED_KEY: self.seed,
                training.EPOCHS_KEY: self.epochs_run,
                training.TOTAL_EPOCHS_KEY: self.total_epochs,
                training.MAX_STEPS_KEY: self.max_steps_per_epoch,
            }
        if self._is_lora:
            rank, alpha = self._adapter_config["r"], self._adapter_config["lora_alpha"]
            ckpt_dict |= {
                training.ADAPTER_KEY: get_adapter_state_dict(state_dict),
                training.ADAPTER_CONFIG: self._adapter_config,
                training.MODEL_KEY: get_merged_lora_ckpt(state_dict, rank=rank, alpha=alpha),
            }
        self._checkpointer.save_checkpoint(
            ckpt_dict,
            epoch=epoch,
            intermediate_checkpoint=intermediate_checkpoint,
            adapter_only=self._save_adapter_weights_only,
        )

    def _step_loss(self, batch: dict[str, torch.Tensor]) -> None:
        """Add the gradients of a batch."""
        if self._fake_quant_after_n_steps is not None and self.global_step == 0:
            self._model.apply(_get_disable_fake_quant(self._quantizer_mode))
        elif self._fake_quant_after_n_steps == self.global_step:
            self._model.apply(_get_enable_fake_quant(self._quantizer_mode))
        utils.batch_to_device(batch, self._device)
        self._num_tokens += (batch["labels"] != self._loss_fn.ignore_index).sum()
        with self.train_context(self.context_parallel_manager(list(batch.values()))):
            labelled = (batch["labels"] != self._loss_fn.ignore_index).sum()
            current_loss = self._loss_step(batch) * labelled
            self._running_loss += current_loss.detach()
            if self._optimizer_in_bwd:
                self._sum_over_ranks()
                current_loss = current_loss * (self.world_size / self._num_tokens)
            current_loss.backward()

    def _sum_over_ranks(self) -> None:
        if self._is_distributed:
            torch.distributed.all_reduce(self._num_tokens, group=self.world_mesh["dp"].get_group())
            torch.distributed.all_reduce(self._running_loss, group=self.world_mesh["dp_cp"].get_group())

    def _step_metrics(self) -> dict[str, Any]:
        """Scale the gradients of a step; returns what is logged of it."""
        if not self._optimizer_in_bwd:
            self._sum_over_ranks()
            if self._is_distributed:
                ranks = self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard * self.parallel_dims.cp
                training.scale_grads_(self._model.parameters(), ranks / self._num_tokens)
            else:
                training.scale_grads(self._model, 1 / self._num_tokens)
        metrics = {"loss": self._running_loss.item() / self._num_tokens.item()}
        self._running_loss, self._num_tokens = 0, 0
        return metrics

    def train(self) -> None:
        training.cleanup_before_training()
        self._running_loss, self._num_tokens = 0, 0
        self._profiler.start()
        for curr_epoch in range(self.epochs_run, self.total_epochs):
            self._dataloader.sampler.set_epoch(curr_epoch)
            for idx, batch in enumerate(self._dataloader):
                if idx < self._skip_batches:
                    continue
                if idx // self._gradient_accumulation_steps == self._steps_per_epoch:
                    break
                self._step_loss(batch)
                if (idx + 1) % self._gradient_accumulation_steps:
                    continue
                log_dict = self._step_metrics()
                if not self._optimizer_in_bwd:
                    if self._clip_grad_norm is not None:
                        grad_norm = torch.nn.utils.clip_grad_norm_(
                            self._model.parameters(), max_norm=float(self._clip_grad_norm)
                        )
                        log_dict["grad_norm"] = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
                    self._optimizer.step()
                    self._optimizer.zero_grad(set_to_none=True)
                self.global_step += 1
                self._batches_run = idx + 1
                log_dict["lr"] = get_lr(self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer)
                if self._lr_scheduler is not None:
                    self._lr_scheduler.step()
                if self._log_peak_memory_stats:
                    log_dict.update(training.get_memory_stats(device=self._device))
                if self._is_rank_zero and self.global_step % self._log_every_n_steps == 0:
                    self._metric_logger.log_dict(log_dict, step=self.global_step)
                self._profiler.step()
                if self.save_every_n_steps is not None and self.global_step % self.save_every_n_steps == 0:
                    self.save_checkpoint(epoch=curr_epoch, full_tensors=False)
            self.epochs_run += 1
            self._skip_batches = self._batches_run = 0
            if self.save_every_n_steps is None:
                self.save_checkpoint(epoch=curr_epoch)
        self._profiler.stop()

    def cleanup(self) -> None:
        if self._is_rank_zero:
            self._metric_logger.close()
        if self._is_distributed:
            destroy_process_group()


class OlderPreferenceRecipe(OlderRecipe):
    """DPO, through a CheckpointClient on any number of devices."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self._checkpoint_client = CheckpointClient(cfg)

    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        self._running: dict[str, Any] = {}
        if not self._is_lora:
            client = CheckpointClient(cfg, checkpointer=config.instantiate(cfg.ref_checkpointer))
            self._ref_model = self._setup_model(cfg, client.load_base_checkpoint()).eval()
            for parameter in self._ref_model.parameters():
                parameter.requires_grad = False
            for model in (self._model, self._ref_model):
                training.disable_dropout(model)

    def _collate(self, cfg: DictConfig) -> Any:
        return partial(padded_collate_dpo, padding_idx=self._tokenizer.pad_id, ignore_idx=CROSS_ENTROPY_IGNORE_IDX)

    def concatenated_forward(
        self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> ChosenRejectedOutputs:
        tokens, labels = (tensor.to(self._device) for tensor in batch)
        pairs = tokens.shape[0] // 2
        with self.activations_handling_ctx:
            logits = model(tokens)
        log_probs = rlhf.get_batch_log_probs(logits, labels, return_average_logprobs=False)
        return ChosenRejectedOutputs(log_probs[:pairs], log_probs[pairs:], logits[:pairs], logits[pairs:])

    def _step_loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        policy = self.concatenated_forward(self._model, batch)
        logits = {"logits/chosen": policy.chosen_logits, "logits/rejected": policy.rejected_logits}
        policy.chosen_logits = policy.rejected_logits = None
        with torch.no_grad():
            if self._is_lora:
                with disable_adapter(self._model):
                    reference = self.concatenated_forward(self._model, batch)
            else:
                reference = self.concatenated_forward(self._ref_model, batch)
        loss, chosen, rejected = self._loss_fn(policy, reference)
        (loss.mean() / self._gradient_accumulation_steps).backward()
        metrics = {
            "loss": loss.detach(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "log_probs/chosen": policy.chosen_logps.detach(),
            "log_probs/rejected": policy.rejected_logps.detach(),
            **{name: tensor.detach() for name, tensor in logits.items()},
        }
        for name, value in metrics.items():
            self._running[name] = self._running.get(name, 0) + value.mean() / self._gradient_accumulation_steps

    def _step_metrics(self) -> dict[str, Any]:
        if self._is_distributed:
            for value in self._running.values():
                torch.distributed.all_reduce(value)
        metrics = {name: value.item() / self.world_size for name, value in self._running.items()}
        self._running = {}
        return {**metrics, "rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    config.log_config(recipe_name="OlderRecipe", cfg=cfg)
    recipe = (OlderPreferenceRecipe if "beta" in cfg.loss else OlderRecipe)(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
