"""A recipe as users wrote them against earlier releases: one device, full fine-tuning or LoRA.

It trains from a ``DictConfig``, reads and writes checkpoints as dicts through the checkpointer itself, and knows
nothing of this library's newer interfaces.
"""

import sys
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch.utils.data import DataLoader, DistributedSampler

from torchtune import config, modules, training, utils
from torchtune.config._utils import _get_component_from_path
from torchtune.data import padded_collate_packed
from torchtune.datasets import ConcatDataset
from torchtune.modules import common_utils
from torchtune.modules.loss import SFTLoss
from torchtune.modules.peft import (
    get_adapter_params,
    get_adapter_state_dict,
    get_lora_module_names,
    get_merged_lora_ckpt,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training import PROFILER_KEY, DummyProfiler
from torchtune.training.lr_schedulers import get_lr

log = utils.get_logger("DEBUG")


class OlderRecipe(FTRecipeInterface):
    def __init__(self, cfg: DictConfig) -> None:
        self._device = utils.get_device(device=cfg.device)
        self._dtype = training.get_dtype(cfg.dtype, device=self._device)
        self._log_every_n_steps = cfg.get("log_every_n_steps", 1)
        self._log_peak_memory_stats = cfg.get("log_peak_memory_stats", False)
        if self._log_peak_memory_stats and self._device.type not in training.VALID_BACKENDS_FOR_MEMORY_STATS:
            self._log_peak_memory_stats = False
        self.seed = training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.epochs_run = 0
        self.total_epochs = cfg.epochs
        self.max_steps_per_epoch = cfg.max_steps_per_epoch
        self.global_step = 0
        self._resume_from_checkpoint = cfg.resume_from_checkpoint
        self._gradient_accumulation_steps = cfg.gradient_accumulation_steps
        self._optimizer_in_bwd = cfg.get("optimizer_in_bwd", False)
        self._clip_grad_norm = cfg.get("clip_grad_norm", None)
        self._save_adapter_weights_only = cfg.get("save_adapter_weights_only", False)
        self._lora = "lora_rank" in cfg.model

    def load_checkpoint(self, cfg_checkpointer: DictConfig) -> dict[str, Any]:
        self._checkpointer = config.instantiate(cfg_checkpointer, should_load_recipe_state=self._resume_from_checkpoint)
        checkpoint_dict = self._checkpointer.load_checkpoint()
        if self._resume_from_checkpoint:
            self._update_recipe_state(checkpoint_dict)
        return checkpoint_dict

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        self.epochs_run = ckpt_dict[training.EPOCHS_KEY]
        if self.seed != ckpt_dict[training.SEED_KEY]:
            self.seed = ckpt_dict[training.SEED_KEY]
        if self.max_steps_per_epoch != ckpt_dict[training.MAX_STEPS_KEY]:
            self.max_steps_per_epoch = ckpt_dict[training.MAX_STEPS_KEY]
        assert self.total_epochs == ckpt_dict[training.TOTAL_EPOCHS_KEY]

    def setup(self, cfg: DictConfig) -> None:
        self._metric_logger = config.instantiate(cfg.metric_logger)
        self._metric_logger.log_config(cfg)
        common_utils._use_low_cpu_ram = cfg.get("low_cpu_ram", False)
        checkpoint_dict = self.load_checkpoint(cfg_checkpointer=cfg.checkpointer)
        self._model = self._setup_model(
            cfg_model=cfg.model,
            enable_activation_checkpointing=cfg.enable_activation_checkpointing,
            enable_activation_offloading=cfg.get("enable_activation_offloading", False),
            base_model_state_dict=checkpoint_dict[training.MODEL_KEY],
            lora_weights_state_dict=checkpoint_dict.get(training.ADAPTER_KEY),
        )
        self._tokenizer = config.instantiate(cfg.tokenizer)
        self._optimizer = self._setup_optimizer(
            cfg_optimizer=cfg.optimizer,
            opt_state_dict=checkpoint_dict[training.OPT_KEY] if self._resume_from_checkpoint else None,
        )
        self._loss_fn = config.instantiate(cfg.loss)
        if cfg.compile:
            self._loss_fn = training.compile_loss(self._loss_fn, verbose=True)
        if isinstance(self._loss_fn, SFTLoss):
            self._loss_fn.set_model_output(self._model)
        self._sampler, self._dataloader = self._setup_data(
            cfg_dataset=cfg.dataset,
            shuffle=cfg.shuffle,
            batch_size=cfg.batch_size,
            collate_fn=cfg.get("collate_fn", "torchtune.data.padded_collate_sft"),
        )
        self._steps_per_epoch = len(self._dataloader) // self._gradient_accumulation_steps
        if self.max_steps_per_epoch is not None:
            self._steps_per_epoch = min(self._steps_per_epoch, self.max_steps_per_epoch)
        self.global_step = self.epochs_run * self._steps_per_epoch
        self._lr_scheduler = self._setup_lr_scheduler(
            cfg_lr_scheduler=cfg.get("lr_scheduler", None),
            num_training_steps=self.total_epochs * self._steps_per_epoch,
            last_epoch=self.global_step - 1,
        )
        self._profiler = self._setup_profiler(cfg.get(PROFILER_KEY, None))

    def _setup_profiler(self, cfg_profiler: DictConfig | None) -> Any:
        if cfg_profiler is None:
            return DummyProfiler()
        if cfg_profiler.get("_component_", None) is None:
            cfg_profiler["_component_"] = "torchtune.training.setup_torch_profiler"
        profiler, _ = config.instantiate(cfg_profiler)
        return profiler

    def _setup_model(
        self,
        cfg_model: DictConfig,
        enable_activation_checkpointing: bool,
        enable_activation_offloading: bool,
        base_model_state_dict: dict[str, Any],
        lora_weights_state_dict: dict[str, Any] | None,
    ) -> torch.nn.Module:
        with training.set_default_dtype(self._dtype), self._device:
            model = config.instantiate(cfg_model)
        if self._lora:
            self._lora_rank = cfg_model.lora_rank
            self._lora_alpha = cfg_model.lora_alpha
            self._lora_attn_modules = list(cfg_model.lora_attn_modules)
            self._apply_lora_to_mlp = cfg_model.apply_lora_to_mlp
            self._apply_lora_to_output = getattr(cfg_model, "apply_lora_to_output", False)
            self.adapter_params = get_adapter_params(model)
            set_trainable_params(model, self.adapter_params)
        if enable_activation_checkpointing:
            training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        if self._lora:
            base_missing, base_unexpected = model.load_state_dict(base_model_state_dict, strict=False)
            for module in model.modules():
                if hasattr(module, "initialize_dora_magnitude"):
                    module.initialize_dora_magnitude()
            lora_missing, lora_unexpected = None, None
            if lora_weights_state_dict:
                lora_missing, lora_unexpected = model.load_state_dict(lora_weights_state_dict, strict=False)
            validate_missing_and_unexpected_for_lora(
                state_dict_keys=model.state_dict().keys(),
                base_missing=base_missing,
                base_unexpected=base_unexpected,
                lora_missing=lora_missing,
                lora_unexpected=lora_unexpected,
            )
        else:
            model.load_state_dict(base_model_state_dict)
        training.validate_expected_param_dtype(model.named_parameters(), dtype=self._dtype)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(model, enable_activation_offloading)
        return model

    def _setup_optimizer(self, cfg_optimizer: DictConfig, opt_state_dict: dict[str, Any] | None) -> Any:
        if self._optimizer_in_bwd:
            optim_dict = {
                param: config.instantiate(cfg_optimizer, [param])
                for param in self._model.parameters()
                if param.requires_grad
            }
            training.register_optim_in_bwd_hooks(model=self._model, optim_dict=optim_dict)
            self._optim_ckpt_wrapper = training.create_optim_in_bwd_wrapper(model=self._model, optim_dict=optim_dict)
            if opt_state_dict is not None:
                self._optim_ckpt_wrapper.load_state_dict(opt_state_dict)
            return None
        optimizer = config.instantiate(cfg_optimizer, params=self._model.parameters())
        if opt_state_dict is not None:
            optimizer.load_state_dict(opt_state_dict)
        return optimizer

    def _setup_lr_scheduler(self, cfg_lr_scheduler: DictConfig | None, num_training_steps: int, last_epoch: int) -> Any:
        if cfg_lr_scheduler is None:
            return None
        optimizer = (
            next(iter(self._optim_ckpt_wrapper.optim_map.values())) if self._optimizer_in_bwd else self._optimizer
        )
        lr_scheduler = config.instantiate(
            cfg_lr_scheduler, optimizer, num_training_steps=num_training_steps, last_epoch=last_epoch
        )
        if self._optimizer_in_bwd:
            self._optim_ckpt_wrapper.set_lr_scheduler(lr_scheduler)
        return lr_scheduler

    def _setup_data(
        self, cfg_dataset: DictConfig, shuffle: bool, batch_size: int, collate_fn: str
    ) -> tuple[DistributedSampler, DataLoader]:
        if isinstance(cfg_dataset, ListConfig):
            parts = [config.instantiate(one, self._tokenizer) for one in cfg_dataset]
            ds, packed = ConcatDataset(datasets=parts), getattr(parts[0], "packed", False)
        else:
            ds, packed = config.instantiate(cfg_dataset, self._tokenizer), cfg_dataset.get("packed", False)
        collate = _get_component_from_path(collate_fn)
        sampler = DistributedSampler(ds, num_replicas=1, rank=0, shuffle=shuffle, seed=self.seed)
        dataloader = DataLoader(
            dataset=ds,
            sampler=sampler,
            batch_size=batch_size,
            drop_last=True,
            collate_fn=padded_collate_packed
            if packed
            else partial(collate, padding_idx=self._tokenizer.pad_id, ignore_idx=self._loss_fn.ignore_index),
        )
        return sampler, dataloader

    def _loss_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        with self.activations_handling_ctx:
            outputs = self._model(**batch)
        if not isinstance(self._loss_fn, SFTLoss):
            labels = labels.reshape(-1)
            outputs = outputs.reshape(-1, outputs.size(-1))
        return self._loss_fn(outputs, labels)

    def save_checkpoint(self, epoch: int) -> None:
        ckpt_dict: dict[str, Any] = {}
        intermediate_checkpoint = epoch + 1 < self.total_epochs
        if intermediate_checkpoint:
            source = self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer
            ckpt_dict.update(
                {
                    training.OPT_KEY: source.state_dict(),
                    training.SEED_KEY: self.seed,
                    training.EPOCHS_KEY: self.epochs_run,
                    training.TOTAL_EPOCHS_KEY: self.total_epochs,
                    training.MAX_STEPS_KEY: self.max_steps_per_epoch,
                }
            )
        if self._lora:
            state_dict = {name: tensor.cpu() for name, tensor in self._model.state_dict().items()}
            ckpt_dict[training.ADAPTER_KEY] = get_adapter_state_dict(state_dict)
            if not self._save_adapter_weights_only:
                merged = get_merged_lora_ckpt(state_dict, rank=self._lora_rank, alpha=self._lora_alpha)
                ckpt_dict[training.MODEL_KEY] = merged
            ckpt_dict[training.ADAPTER_CONFIG] = {
                "r": self._lora_rank,
                "lora_alpha": self._lora_alpha,
                "target_modules": get_lora_module_names(
                    self._lora_attn_modules, self._apply_lora_to_mlp, self._apply_lora_to_output
                ),
                "peft_type": "LORA",
            }
        else:
            ckpt_dict[training.MODEL_KEY] = self._model.state_dict()
        self._checkpointer.save_checkpoint(
            ckpt_dict,
            epoch=epoch,
            intermediate_checkpoint=intermediate_checkpoint,
            adapter_only=self._save_adapter_weights_only,
        )

    def train(self) -> None:
        if not self._optimizer_in_bwd:
            self._optimizer.zero_grad()
        running_loss, num_tokens = 0, 0
        self._profiler.start()
        for curr_epoch in range(self.epochs_run, self.total_epochs):
            self._sampler.set_epoch(curr_epoch)
            for idx, batch in enumerate(self._dataloader):
                if idx // self._gradient_accumulation_steps == self._steps_per_epoch:
                    break
                utils.batch_to_device(batch, self._device)
                current_num_tokens = (batch["labels"] != self._loss_fn.ignore_index).sum()
                num_tokens += current_num_tokens
                current_loss = self._loss_step(batch) * current_num_tokens
                running_loss += current_loss.detach()
                if self._optimizer_in_bwd:
                    current_loss = current_loss / num_tokens
                current_loss.backward()
                if (idx + 1) % self._gradient_accumulation_steps:
                    continue
                grad_norm = None
                if not self._optimizer_in_bwd:
                    training.scale_grads(self._model, torch.tensor(1 / num_tokens))
                    if self._clip_grad_norm is not None:
                        grad_norm = torch.nn.utils.clip_grad_norm_(
                            self._model.parameters(), max_norm=float(self._clip_grad_norm)
                        )
                    self._optimizer.step()
                    self._optimizer.zero_grad(set_to_none=True)
                self.global_step += 1
                lr = get_lr(self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer)
                if self._lr_scheduler is not None:
                    if self._optimizer_in_bwd:
                        self._optim_ckpt_wrapper.step_lr_scheduler()
                    else:
                        self._lr_scheduler.step()
                log_dict = {"loss": running_loss.item() / num_tokens.item(), "lr": lr}
                if grad_norm is not None:
                    log_dict["grad_norm"] = grad_norm
                self._metric_logger.log_dict(log_dict, step=self.global_step)
                running_loss, num_tokens = 0, 0
                self._profiler.step()
            self.epochs_run += 1
            self.save_checkpoint(epoch=curr_epoch)
        self._profiler.stop()

    def cleanup(self) -> None:
        self._metric_logger.close()


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    config.log_config(recipe_name="OlderRecipe", cfg=cfg)
    recipe = OlderRecipe(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
