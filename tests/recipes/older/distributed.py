"""A recipe as users wrote them against earlier releases: FSDP, full fine-tuning or LoRA, through a CheckpointClient."""

import sys
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed._tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from torchtune import config, modules, training, utils
from torchtune.config._utils import _get_component_from_path
from torchtune.modules.embedding_utils import resize_token_embeddings
from torchtune.modules.loss import SFTLoss
from torchtune.modules.moe import utils as moe_utils
from torchtune.modules.peft import (
    AdapterModule,
    get_adapter_params,
    get_lora_module_names,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training.activations import apply_selective_activation_checkpointing
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress
from torchtune.training.lr_schedulers import get_lr
from torchtune.training.quantization import (
    _get_disable_fake_quant,
    _get_enable_fake_quant,
    convert_to_float8_training,
    get_quantizer_mode,
    is_fp8_tensorwise_scaling,
    swap_lora_linear_with_qat,
)

log = utils.get_logger("DEBUG")


class OlderDistributedRecipe(FTRecipeInterface):
    def __init__(self, cfg: DictConfig) -> None:
        device_type = cfg.device
        self._device = utils.get_device(device=device_type)
        self._dtype = training.get_dtype(cfg.dtype, device=self._device)
        self.fsdp_cpu_offload = cfg.get("fsdp_cpu_offload", False)
        self.distributed_backend = training.get_distributed_backend(
            device_type, offload_ops_to_cpu=self.fsdp_cpu_offload or cfg.get("enable_async_checkpointing", False)
        )
        init_process_group(self.distributed_backend)
        self.world_size, self.rank = utils.get_world_size_and_rank()
        self._is_rank_zero = self.rank == 0
        self.parallel_dims = training.ParallelDims(
            dp_replicate=cfg.get("data_parallel_replicate_dim", 1),
            dp_shard=cfg.get("data_parallel_shard_dim", -1),
            tp=cfg.get("tensor_parallel_dim", 1),
            cp=cfg.get("context_parallel_dim", 1),
            world_size=self.world_size,
        )
        self.world_mesh = self.parallel_dims.build_mesh(device_type=device_type)
        if self.parallel_dims.dp_enabled:
            dp_mesh = self.world_mesh["dp"]
            self.dp_degree, self.dp_rank = dp_mesh.size(), dp_mesh.get_local_rank()
        else:
            self.dp_degree, self.dp_rank = 1, 0
        self.seed = training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.epochs_run, self.global_step = 0, 0
        self.total_epochs = cfg.epochs
        self.max_steps_per_epoch = cfg.max_steps_per_epoch
        self.save_every_n_steps = cfg.get("save_every_n_steps")
        self._resume_from_checkpoint = cfg.resume_from_checkpoint
        self._enable_async_checkpointing = cfg.get("enable_async_checkpointing", False)
        self._log_every_n_steps = cfg.get("log_every_n_steps", 1)
        self._log_peak_memory_stats = cfg.get("log_peak_memory_stats", False)
        if self._log_peak_memory_stats and self._device.type not in training.VALID_BACKENDS_FOR_MEMORY_STATS:
            self._log_peak_memory_stats = False
        self._gradient_accumulation_steps = cfg.gradient_accumulation_steps
        self._optimizer_in_bwd = cfg.get("optimizer_in_bwd", False)
        self._clip_grad_norm = cfg.get("clip_grad_norm", None)
        self._save_adapter_weights_only = cfg.get("save_adapter_weights_only", False)
        self._enable_fp8_training = cfg.get("enable_fp8_training", False)
        self._fake_quant_after_n_steps = cfg.get("fake_quant_after_n_steps", None)
        self._adapter_config = None
        self._checkpoint_client = CheckpointClient(cfg)

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        self.epochs_run = ckpt_dict[training.EPOCHS_KEY]
        self.global_step = ckpt_dict[training.STEPS_KEY]
        assert self.seed == ckpt_dict[training.SEED_KEY]
        assert self.total_epochs == ckpt_dict[training.TOTAL_EPOCHS_KEY]
        self._skip_batches = ckpt_dict[training.DATALOADER_KEY]["batches"]

    def setup(self, cfg: DictConfig) -> None:
        if self._is_rank_zero:
            self._metric_logger = config.instantiate(cfg.metric_logger)
            self._metric_logger.log_config(cfg)
        utils.log_rank_zero(log, "Loading the base checkpoint.")
        self._skip_batches = 0
        checkpoint_dict = self._checkpoint_client.load_base_checkpoint()
        self._tokenizer = config.instantiate(cfg.tokenizer)
        self._model = self._setup_model(cfg, checkpoint_dict)
        in_dict = training.OPT_KEY in checkpoint_dict
        self._optimizer = self._setup_optimizer(
            cfg_optimizer=cfg.optimizer, opt_state_dict=checkpoint_dict[training.OPT_KEY] if in_dict else None
        )
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
        self.use_loss_parallel_ctx_manager = self.parallel_dims.tp_enabled and getattr(
            self._loss_fn, "tp_requires_loss_parallel_ctx_manager", False
        )
        self._dataloader = self._setup_data(cfg)
        self._steps_per_epoch = len(self._dataloader) // self._gradient_accumulation_steps
        if self.max_steps_per_epoch is not None:
            self._steps_per_epoch = min(self._steps_per_epoch, self.max_steps_per_epoch)
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
        self.train_context = training.get_train_context(enable_loss_parallel=self.use_loss_parallel_ctx_manager)

    def _setup_model(self, cfg: DictConfig, checkpoint_dict: dict[str, Any]) -> torch.nn.Module:
        with training.set_default_dtype(self._dtype), torch.device("meta"):
            model = config.instantiate(cfg.model)
        if self._enable_fp8_training:
            assert is_fp8_tensorwise_scaling(cfg.get("fp8_recipe_name"))
            model = convert_to_float8_training(model, cfg.get("fp8_recipe_name"))
        if "lora_rank" in cfg.model:
            self._adapter_config = {
                "r": cfg.model.lora_rank,
                "lora_alpha": cfg.model.lora_alpha,
                "target_modules": get_lora_module_names(
                    list(cfg.model.lora_attn_modules),
                    cfg.model.apply_lora_to_mlp,
                    getattr(cfg.model, "apply_lora_to_output", False),
                ),
                "peft_type": "LORA",
            }
            set_trainable_params(model, get_adapter_params(model))
        if cfg.get("quantizer", None) is not None:
            quantizer = config.instantiate(cfg.quantizer)
            self._quantizer_mode = get_quantizer_mode(quantizer)
            assert "qat" in self._quantizer_mode
            if self._adapter_config is None:
                model = quantizer.prepare(model)
            else:
                swap_lora_linear_with_qat(
                    model,
                    quantizer.get_activation_fake_quantize_config(),
                    quantizer.get_weight_fake_quantize_config(),
                )
        if cfg.get("compile", False):
            moe_utils.use_grouped_mm = False
            training.compile_model(model, verbose=self._is_rank_zero)
        if self.parallel_dims.tp_enabled:
            model = training.prepare_mha_for_tp(model, self.world_mesh["tp"])
            plan = config.instantiate(cfg.tensor_parallel_plan, model=model, enable_fp8_training=False)
            torch.distributed.tensor.parallel.parallelize_module(model, self.world_mesh["tp"], parallelize_plan=plan)
        if cfg.get("ac_mode") is not None:
            apply_selective_activation_checkpointing(model, cfg.ac_mode, cfg.get("ac_option"))
        if cfg.get("enable_activation_checkpointing", False):
            training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        if self.parallel_dims.dp_shard_enabled or self.parallel_dims.cp_enabled:
            names = ("dp_replicate", "dp_shard") if self.parallel_dims.dp_replicate_enabled else ("dp_shard_cp",)
            training.shard_model(
                model=model,
                shard_conditions=[
                    partial(training.get_shard_conditions, names_to_match=cfg.get("custom_sharded_layers", None))
                ],
                cpu_offload=self.fsdp_cpu_offload,
                reshard_after_forward=cfg.get("fsdp_reshard_after_forward", True),
                dp_mesh=self.world_mesh[names],
            )
        lora_sd = checkpoint_dict.get(training.ADAPTER_KEY)
        lora_missing, lora_unexpected = None, None
        if lora_sd:
            lora_missing, lora_unexpected = training.load_from_full_model_state_dict(
                model, lora_sd, self._device, cpu_offload=self.fsdp_cpu_offload
            )
        with training.set_default_dtype(self._dtype), self._device:
            for m in model.modules():
                if isinstance(m, AdapterModule) and not lora_sd:
                    m.to_empty(device="cpu" if self.fsdp_cpu_offload else self._device)
                    m.initialize_parameters()
                if hasattr(m, "rope_init"):
                    m.rope_init()
        base_missing, base_unexpected = training.load_from_full_model_state_dict(
            model,
            checkpoint_dict[training.MODEL_KEY],
            self._device,
            strict=self._adapter_config is None,
            cpu_offload=self.fsdp_cpu_offload,
        )
        for m in model.modules():
            if hasattr(m, "initialize_dora_magnitude") and not lora_sd:
                m.initialize_dora_magnitude()
        if self._adapter_config is not None:
            validate_missing_and_unexpected_for_lora(
                state_dict_keys=model.state_dict().keys(),
                base_missing=base_missing,
                base_unexpected=base_unexpected,
                lora_missing=lora_missing,
                lora_unexpected=lora_unexpected,
            )
        training.validate_no_params_on_meta_device(model)
        if cfg.get("resize_token_embeddings", False):
            resize_token_embeddings(model, self._tokenizer.vocab_size)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(model, False)
        torch.distributed.barrier()
        return model

    def _setup_optimizer(self, cfg_optimizer: DictConfig, opt_state_dict: dict[str, Any] | None) -> Any:
        if self._optimizer_in_bwd:
            optim_dict = {param: config.instantiate(cfg_optimizer, [param]) for param in self._model.parameters()}
            training.register_optim_in_bwd_hooks(model=self._model, optim_dict=optim_dict)
            self._optim_ckpt_wrapper = training.create_optim_in_bwd_wrapper(model=self._model, optim_dict=optim_dict)
            if opt_state_dict is not None:
                for param in opt_state_dict:
                    training.load_from_full_optimizer_state_dict(
                        self._model, self._optim_ckpt_wrapper.optim_map[param], opt_state_dict[param], self._device
                    )
            return None
        optimizer = config.instantiate(cfg_optimizer, self._model.parameters())
        if opt_state_dict is not None:
            training.load_from_full_optimizer_state_dict(self._model, optimizer, opt_state_dict, self._device)
        return optimizer

    def _setup_data(self, cfg: DictConfig) -> DataLoader:
        ds = config.instantiate(cfg.dataset, self._tokenizer)
        collate = _get_component_from_path(cfg.get("collate_fn", "torchtune.data.padded_collate_sft"))
        sampler = DistributedSampler(
            ds, num_replicas=self.dp_degree, rank=self.dp_rank, shuffle=cfg.shuffle, seed=self.seed
        )
        return DataLoader(
            dataset=ds,
            batch_size=cfg.batch_size,
            sampler=sampler,
            drop_last=True,
            collate_fn=partial(
                collate,
                padding_idx=self._tokenizer.pad_id,
                ignore_idx=self._loss_fn.ignore_index,
                pad_to_multiple_of=self.parallel_dims.min_seq_len_divisor,
                cp_degree=cfg.get("context_parallel_dim", 1),
            ),
        )

    def _loss_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        with self.activations_handling_ctx:
            outputs = self._model(**batch)
        if not isinstance(self._loss_fn, SFTLoss):
            labels = labels.reshape(-1)
            outputs = outputs.reshape(-1, outputs.size(-1))
            if isinstance(outputs, DTensor):
                outputs = outputs.full_tensor()
        return self._loss_fn(outputs, labels)

    def save_checkpoint(self, *, epoch: int, full_tensors: bool) -> None:
        self._checkpoint_client.save_checkpoint(
            model=self._model,
            optimizer=self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer,
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
            single_device=False,
            full_tensors=full_tensors,
            dir_prefix="epoch" if self.save_every_n_steps is None else "step",
        )

    def train(self) -> None:
        training.cleanup_before_training()
        if not self._optimizer_in_bwd:
            self._optimizer.zero_grad()
        running_loss, num_tokens = 0, 0
        for curr_epoch in range(self.epochs_run, self.total_epochs):
            self._dataloader.sampler.set_epoch(curr_epoch)
            for idx, batch in enumerate(self._dataloader):
                if idx < self._skip_batches:
                    continue
                if idx // self._gradient_accumulation_steps == self._steps_per_epoch:
                    break
                if self._fake_quant_after_n_steps is not None and idx % self._gradient_accumulation_steps == 0:
                    if self.global_step == 0:
                        self._model.apply(_get_disable_fake_quant(self._quantizer_mode))
                    elif self.global_step == self._fake_quant_after_n_steps:
                        self._model.apply(_get_enable_fake_quant(self._quantizer_mode))
                utils.batch_to_device(batch, self._device)
                current_num_tokens = (batch["labels"] != self._loss_fn.ignore_index).sum()
                num_tokens += current_num_tokens
                with self.train_context(self.context_parallel_manager(list(batch.values()))):
                    labelled = (batch["labels"] != self._loss_fn.ignore_index).sum()
                    current_loss = self._loss_step(batch) * labelled
                    running_loss += current_loss.detach()
                    if self._optimizer_in_bwd:
                        torch.distributed.all_reduce(num_tokens)
                        torch.distributed.all_reduce(running_loss)
                        current_loss = current_loss * (self.world_size / num_tokens)
                    current_loss.backward()
                if (idx + 1) % self._gradient_accumulation_steps:
                    continue
                log_dict = {}
                if not self._optimizer_in_bwd:
                    group = self.world_mesh["dp"].get_group()
                    torch.distributed.all_reduce(num_tokens, group=group)
                    torch.distributed.all_reduce(running_loss, group=self.world_mesh["dp_cp"].get_group())
                    ranks = self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard * self.parallel_dims.cp
                    training.scale_grads_(self._model.parameters(), ranks / num_tokens)
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
                log_dict["loss"] = running_loss.item() / num_tokens.item()
                if self._log_peak_memory_stats:
                    log_dict.update(training.get_memory_stats(device=self._device))
                if self._is_rank_zero and self.global_step % self._log_every_n_steps == 0:
                    self._metric_logger.log_dict(log_dict, step=self.global_step)
                running_loss, num_tokens = 0, 0
                if self.save_every_n_steps is not None and self.global_step % self.save_every_n_steps == 0:
                    self.save_checkpoint(epoch=curr_epoch, full_tensors=False)
            self.epochs_run += 1
            self._skip_batches = self._batches_run = 0
            if self.save_every_n_steps is None:
                self.save_checkpoint(epoch=curr_epoch, full_tensors=True)

    def cleanup(self) -> None:
        if self._is_rank_zero:
            self._metric_logger.close()
        destroy_process_group()


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    if not training.is_distributed():
        raise RuntimeError("Start this recipe with tune run --nproc_per_node.")
    if cfg.get("fsdp_cpu_offload", False):
        training.set_torch_num_threads()
    config.log_config(recipe_name="OlderDistributedRecipe", cfg=cfg)
    recipe = OlderDistributedRecipe(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
