"""A recipe as users wrote them against earlier releases: distillation into a LoRA student, alone or with FSDP."""

import sys
import time
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import DataLoader, DistributedSampler

from torchtune import config, modules, training, utils
from torchtune.data import padded_collate_packed, padded_collate_sft
from torchtune.datasets import ConcatDataset
from torchtune.modules import common_utils
from torchtune.modules.peft import (
    AdapterModule,
    get_adapter_params,
    get_lora_module_names,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.training import PROFILER_KEY, DummyProfiler
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress

log = utils.get_logger("DEBUG")


class OlderDistillationRecipe(FTRecipeInterface):
    def __init__(self, cfg: DictConfig) -> None:
        self._device = utils.get_device(device=cfg.device)
        self._dtype = training.get_dtype(cfg.dtype, device=self._device)
        self._is_distributed = training.is_distributed()
        if self._is_distributed:
            init_process_group(training.get_distributed_backend(cfg.device, offload_ops_to_cpu=False))
        self.world_size, self.rank = utils.get_world_size_and_rank()
        self._is_rank_zero = self.rank == 0
        self.seed = training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self.epochs_run = self.global_step = 0
        self.total_epochs = cfg.epochs
        self.max_steps_per_epoch = cfg.max_steps_per_epoch
        self.save_every_n_steps = cfg.get("save_every_n_steps")
        self._resume_from_checkpoint = cfg.resume_from_checkpoint
        self._gradient_accumulation_steps = cfg.gradient_accumulation_steps
        self._clip_grad_norm = cfg.get("clip_grad_norm", None)
        self._save_adapter_weights_only = cfg.get("save_adapter_weights_only", False)
        self._log_every_n_steps = cfg.get("log_every_n_steps", 1)
        self._log_peak_memory_stats = cfg.get("log_peak_memory_stats", False)
        self._kd_ratio = cfg.get("kd_ratio", 0.5)
        self._checkpoint_client = CheckpointClient(cfg)

    def load_teacher_checkpoint(self, cfg_checkpointer: DictConfig) -> dict[str, Any]:
        return config.instantiate(cfg_checkpointer).load_checkpoint()

    def setup(self, cfg: DictConfig) -> None:
        if self._is_rank_zero:
            self._metric_logger = config.instantiate(cfg.metric_logger)
            self._metric_logger.log_config(cfg)
        common_utils._use_low_cpu_ram = cfg.get("low_cpu_ram", False)
        checkpoint_dict = self._checkpoint_client.load_base_checkpoint()
        teacher_dict = self.load_teacher_checkpoint(cfg.teacher_checkpointer)
        self._model = self._setup_student(cfg, checkpoint_dict)
        self._teacher_model = self._setup_teacher(cfg, teacher_dict[training.MODEL_KEY])
        self._tokenizer = config.instantiate(cfg.tokenizer)
        self._optimizer = config.instantiate(cfg.optimizer, self._model.parameters())
        if self._resume_from_checkpoint:
            state = checkpoint_dict[training.OPT_KEY]
            if self._is_distributed:
                training.load_from_full_optimizer_state_dict(self._model, self._optimizer, state, self._device)
            else:
                self._optimizer.load_state_dict(state)
            self.epochs_run = checkpoint_dict[training.EPOCHS_KEY]
            self.global_step = checkpoint_dict[training.STEPS_KEY]
            assert self.seed == checkpoint_dict[training.SEED_KEY]
            assert self.total_epochs == checkpoint_dict[training.TOTAL_EPOCHS_KEY]
            assert self.max_steps_per_epoch == checkpoint_dict[training.MAX_STEPS_KEY]
        self._loss_fn = config.instantiate(cfg.loss)
        self._kd_loss_fn = config.instantiate(cfg.kd_loss)
        if cfg.compile:
            self._loss_fn = training.compile_loss(self._loss_fn, verbose=self._is_rank_zero)
            self._kd_loss_fn = training.compile_loss(self._kd_loss_fn, verbose=self._is_rank_zero)
        if self._loss_fn.__class__.__name__ == "CEWithChunkedOutputLoss":
            self._model.set_num_output_chunks(self._loss_fn.num_output_chunks)
            self._teacher_model.set_num_output_chunks(self._loss_fn.num_output_chunks)
            assert self._loss_fn.num_output_chunks == self._kd_loss_fn.num_output_chunks
        self._sampler, self._dataloader = self._setup_data(cfg.dataset, cfg.shuffle, cfg.batch_size)
        self._steps_per_epoch = len(self._dataloader) // self._gradient_accumulation_steps
        if self.max_steps_per_epoch is not None:
            self._steps_per_epoch = min(self._steps_per_epoch, self.max_steps_per_epoch)
        self._lr_scheduler = config.instantiate(
            cfg.lr_scheduler,
            self._optimizer,
            num_training_steps=self.total_epochs * self._steps_per_epoch,
            last_epoch=self.global_step - 1,
        )
        cfg_profiler = cfg.get(PROFILER_KEY, None)
        self._profiler = DummyProfiler() if cfg_profiler is None else config.instantiate(cfg_profiler)[0]

    def _setup_student(self, cfg: DictConfig, checkpoint_dict: dict[str, Any]) -> torch.nn.Module:
        with training.set_default_dtype(self._dtype), torch.device("meta") if self._is_distributed else self._device:
            model = config.instantiate(cfg.model)
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
        if cfg.compile:
            training.compile_model(model, verbose=self._is_rank_zero)
        if cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        adapter = checkpoint_dict.get(training.ADAPTER_KEY)
        found = {}
        for name, state in (("base", checkpoint_dict[training.MODEL_KEY]), ("lora", adapter)):
            if name == "base" and self._is_distributed:
                self._shard(model, cfg)
                for module in model.modules():
                    if isinstance(module, AdapterModule) and not adapter:
                        module.to_empty(device=self._device)
                        module.initialize_parameters()
            if state is None:
                found |= {f"{name}_missing": None, f"{name}_unexpected": None}
                continue
            missing, unexpected = self._load(model, state, strict=False)
            found |= {f"{name}_missing": missing, f"{name}_unexpected": unexpected}
        for module in model.modules():
            if hasattr(module, "initialize_dora_magnitude") and not adapter:
                module.initialize_dora_magnitude()
        validate_missing_and_unexpected_for_lora(
            lora_attn_modules=list(cfg.model.lora_attn_modules),
            apply_lora_to_mlp=cfg.model.apply_lora_to_mlp,
            apply_lora_to_output=getattr(cfg.model, "apply_lora_to_output", False),
            state_dict_keys=model.state_dict().keys(),
            **found,
        )
        training.validate_expected_param_dtype(get_adapter_params(model).items(), dtype=self._dtype)
        return model

    def _setup_teacher(self, cfg: DictConfig, state: dict[str, Any]) -> torch.nn.Module:
        with training.set_default_dtype(self._dtype), torch.device("meta") if self._is_distributed else self._device:
            model = config.instantiate(cfg.teacher_model)
        if self._is_distributed:
            self._shard(model, cfg)
        self._load(model, state, strict=True)
        model.eval()
        for parameter in model.parameters():
            parameter.requires_grad = False
        return model

    def _shard(self, model: torch.nn.Module, cfg: DictConfig) -> None:
        training.shard_model(
            model=model,
            shard_conditions=[
                partial(training.get_shard_conditions, names_to_match=cfg.get("custom_sharded_layers", None))
            ],
            cpu_offload=cfg.get("fsdp_cpu_offload", False),
            reshard_after_forward=cfg.get("fsdp_reshard_after_forward", True),
        )

    def _load(self, model: torch.nn.Module, state: dict[str, Any], *, strict: bool) -> Any:
        if not self._is_distributed:
            return model.load_state_dict(state, strict=strict)
        with training.set_default_dtype(self._dtype), self._device:
            for module in model.modules():
                if hasattr(module, "rope_init"):
                    module.rope_init()
        found = training.load_from_full_model_state_dict(
            model, state, self._device, strict=strict, cpu_offload=False, use_distributed_state_dict=False
        )
        training.validate_no_params_on_meta_device(model)
        return found

    def _setup_data(self, cfg_dataset: Any, shuffle: bool, batch_size: int) -> tuple[DistributedSampler, DataLoader]:
        if isinstance(cfg_dataset, ListConfig):
            ds = ConcatDataset(datasets=[config.instantiate(one, self._tokenizer) for one in cfg_dataset])
            packed = False
        else:
            ds, packed = config.instantiate(cfg_dataset, self._tokenizer), cfg_dataset.get("packed", False)
        sampler = DistributedSampler(ds, num_replicas=self.world_size, rank=self.rank, shuffle=shuffle, seed=self.seed)
        collate_fn = (
            padded_collate_packed
            if packed
            else partial(padded_collate_sft, padding_idx=self._tokenizer.pad_id, ignore_idx=self._loss_fn.ignore_index)
        )
        return sampler, DataLoader(
            dataset=ds, sampler=sampler, batch_size=batch_size, drop_last=True, collate_fn=collate_fn
        )

    def _loss_step(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = batch.pop("labels")
        logits = self._model(**batch)
        with torch.no_grad():
            teacher_logits = self._teacher_model(**batch)
        if not isinstance(logits, list):
            labels = labels.reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
            teacher_logits = teacher_logits.reshape(-1, teacher_logits.size(-1))
        return self._loss_fn(logits, labels), self._kd_loss_fn(logits, teacher_logits, labels)

    def save_checkpoint(self, epoch: int) -> None:
        self._checkpoint_client.save_checkpoint(
            model=self._model,
            optimizer=self._optimizer,
            training_progress=TrainingProgress(
                seed=self.seed,
                epochs_run=self.epochs_run,
                total_epochs=self.total_epochs,
                max_steps_per_epoch=self.max_steps_per_epoch,
                steps_run=self.global_step,
                total_training_steps=self.total_epochs * self._steps_per_epoch,
                dataloader_state_dict={},
            ),
            epoch=epoch,
            adapter_config=self._adapter_config.copy(),
            adapter_only=self._save_adapter_weights_only,
            single_device=not self._is_distributed,
        )

    def train(self) -> None:
        training.cleanup_before_training()
        self._optimizer.zero_grad()
        class_loss, kd_loss, num_tokens, t0 = 0, 0, 0, time.perf_counter()
        self._profiler.start()
        for curr_epoch in range(self.epochs_run, self.total_epochs):
            self._sampler.set_epoch(curr_epoch)
            for idx, batch in enumerate(self._dataloader):
                if idx // self._gradient_accumulation_steps == self._steps_per_epoch:
                    break
                utils.batch_to_device(batch, self._device)
                current_num_tokens = (batch["labels"] != self._loss_fn.ignore_index).sum()
                num_tokens += current_num_tokens
                losses = [loss * current_num_tokens for loss in self._loss_step(batch)]
                class_loss += losses[0].detach()
                kd_loss += losses[1].detach()
                ((1 - self._kd_ratio) * losses[0] + self._kd_ratio * losses[1]).backward()
                if (idx + 1) % self._gradient_accumulation_steps:
                    continue
                if self._is_distributed:
                    for total in (num_tokens, class_loss, kd_loss):
                        torch.distributed.all_reduce(total)
                training.scale_grads(self._model, self.world_size / num_tokens)
                log_dict = {}
                if self._clip_grad_norm is not None:
                    norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), float(self._clip_grad_norm))
                    log_dict["grad_norm"] = norm.full_tensor() if self._is_distributed else norm
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self._lr_scheduler.step()
                self.global_step += 1
                class_loss, kd_loss = class_loss.item() / num_tokens.item(), kd_loss.item() / num_tokens.item()
                log_dict |= {
                    "loss": (1 - self._kd_ratio) * class_loss + self._kd_ratio * kd_loss,
                    "class_loss": class_loss,
                    "kd_loss": kd_loss,
                    "lr": self._optimizer.param_groups[0]["lr"],
                    "tokens_per_second_per_gpu": num_tokens / ((time.perf_counter() - t0) * self.world_size),
                }
                if self._device.type == "cuda" and self._log_peak_memory_stats:
                    log_dict |= training.get_memory_stats(device=self._device)
                if self._is_rank_zero and self.global_step % self._log_every_n_steps == 0:
                    self._metric_logger.log_dict(log_dict, step=self.global_step)
                class_loss, kd_loss, num_tokens, t0 = 0, 0, 0, time.perf_counter()
                self._profiler.step()
            self.epochs_run += 1
            self.save_checkpoint(epoch=curr_epoch)
        self._profiler.stop()

    def cleanup(self) -> None:
        if self._is_rank_zero:
            self._metric_logger.close()
        if self._is_distributed:
            destroy_process_group()


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    config.log_config(recipe_name="OlderDistillationRecipe", cfg=cfg)
    recipe = OlderDistillationRecipe(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
