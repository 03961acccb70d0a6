"""A recipe as users wrote them against earlier releases: DPO of all weights or of an adapter, alone or with FSDP."""

import sys
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import DataLoader, DistributedSampler

from torchtune import config, modules, rlhf, training, utils
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_dpo
from torchtune.datasets import ConcatDataset
from torchtune.modules.peft import (
    AdapterModule,
    disable_adapter,
    get_adapter_params,
    get_lora_module_names,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.rlhf import ChosenRejectedOutputs
from torchtune.training import disable_dropout
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress
from torchtune.training.lr_schedulers import get_lr

log = utils.get_logger("DEBUG")


class OlderPreferenceRecipe(FTRecipeInterface):
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
        self._gradient_accumulation_steps = cfg.gradient_accumulation_steps
        self._log_every_n_steps = cfg.get("log_every_n_steps", 1)
        self._log_peak_memory_stats = cfg.get("log_peak_memory_stats", False) and self._device.type == "cuda"
        self._clip_grad_norm = cfg.get("clip_grad_norm", None)
        self._resume_from_checkpoint = cfg.resume_from_checkpoint
        self._save_adapter_weights_only = cfg.get("save_adapter_weights_only", False)
        self._adapter_config = None
        self._checkpoint_client = CheckpointClient(cfg)

    def setup(self, cfg: DictConfig) -> None:
        if self._is_rank_zero:
            self._metric_logger = config.instantiate(cfg.metric_logger)
            self._metric_logger.log_config(cfg)
        utils.log_rank_zero(log, "Loading the base checkpoint.")
        checkpoint_dict = self._checkpoint_client.load_base_checkpoint()
        self._is_lora = "lora_rank" in cfg.model
        self._model = self._setup_model(cfg, checkpoint_dict[training.MODEL_KEY], checkpoint_dict)
        if not self._is_lora:
            client = CheckpointClient(cfg, checkpointer=config.instantiate(cfg.ref_checkpointer))
            reference = client.load_base_checkpoint()[training.MODEL_KEY]
            self._ref_model = self._setup_model(cfg, reference, {}).eval()
            for parameter in self._ref_model.parameters():
                parameter.requires_grad = False
            for model in (self._model, self._ref_model):
                disable_dropout(model)
        self._tokenizer = config.instantiate(cfg.tokenizer)
        self._optimizer = config.instantiate(cfg.optimizer, self._model.parameters())
        if training.OPT_KEY in checkpoint_dict:
            state = checkpoint_dict[training.OPT_KEY]
            if self._is_distributed:
                training.load_from_full_optimizer_state_dict(self._model, self._optimizer, state, self._device)
            else:
                self._optimizer.load_state_dict(state)
            self.epochs_run = checkpoint_dict[training.EPOCHS_KEY]
            self.global_step = checkpoint_dict[training.STEPS_KEY]
        self._loss_fn = config.instantiate(cfg.loss)
        if cfg.get("compile", False):
            training.compile_loss(self._loss_fn, verbose=self._is_rank_zero)
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

    def _setup_model(self, cfg: DictConfig, base: dict[str, Any], checkpoint_dict: dict[str, Any]) -> torch.nn.Module:
        with training.set_default_dtype(self._dtype), torch.device("meta") if self._is_distributed else self._device:
            model = config.instantiate(cfg.model)
        if self._is_lora:
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
        if cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        load = model.load_state_dict
        if self._is_distributed:
            conditions = partial(training.get_shard_conditions, names_to_match=cfg.get("custom_sharded_layers", None))
            training.shard_model(
                model=model,
                shard_conditions=[conditions],
                cpu_offload=cfg.get("fsdp_cpu_offload", False),
                reshard_after_forward=cfg.get("fsdp_reshard_after_forward", True),
            )
            for module in model.modules():
                if isinstance(module, AdapterModule):
                    module.to_empty(device=self._device)
                    module.initialize_parameters()
                if hasattr(module, "rope_init"):
                    module.rope_init()
            load = partial(training.load_from_full_model_state_dict, model, device=self._device, cpu_offload=False)
        adapter = checkpoint_dict.get(training.ADAPTER_KEY)
        base_missing, base_unexpected = load(base, strict=not self._is_lora)
        lora_missing, lora_unexpected = load(adapter, strict=False) if adapter else (None, None)
        if self._is_lora:
            validate_missing_and_unexpected_for_lora(
                state_dict_keys=model.state_dict().keys(),
                base_missing=base_missing,
                base_unexpected=base_unexpected,
                lora_missing=lora_missing,
                lora_unexpected=lora_unexpected,
            )
        training.validate_no_params_on_meta_device(model)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(model, False)
        return model

    def _setup_data(self, cfg_dataset: Any, shuffle: bool, batch_size: int) -> tuple[DistributedSampler, DataLoader]:
        nodes = cfg_dataset if isinstance(cfg_dataset, ListConfig) else [cfg_dataset]
        ds = ConcatDataset(datasets=[config.instantiate(node, tokenizer=self._tokenizer) for node in nodes])
        sampler = DistributedSampler(ds, num_replicas=self.world_size, rank=self.rank, shuffle=shuffle, seed=self.seed)
        return sampler, DataLoader(
            dataset=ds,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=True,
            collate_fn=partial(
                padded_collate_dpo, padding_idx=self._tokenizer.pad_id, ignore_idx=CROSS_ENTROPY_IGNORE_IDX
            ),
        )

    def concatenated_forward(
        self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> ChosenRejectedOutputs:
        tokens, labels = (tensor.to(self._device) for tensor in batch)
        pairs = tokens.shape[0] // 2
        with self.activations_handling_ctx:
            logits = model(tokens)
        log_probs = rlhf.get_batch_log_probs(logits, labels, return_average_logprobs=False)
        return ChosenRejectedOutputs(log_probs[:pairs], log_probs[pairs:], logits[:pairs], logits[pairs:])

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
            ),
            epoch=epoch,
            adapter_config=self._adapter_config,
            adapter_only=self._save_adapter_weights_only,
            single_device=not self._is_distributed,
        )

    def train(self) -> None:
        training.cleanup_before_training()
        self._optimizer.zero_grad()
        running: dict[str, Any] = {}
        for curr_epoch in range(self.epochs_run, self.total_epochs):
            self._sampler.set_epoch(curr_epoch)
            for idx, batch in enumerate(self._dataloader):
                if idx // self._gradient_accumulation_steps == self._steps_per_epoch:
                    break
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
                loss = loss.mean() / self._gradient_accumulation_steps
                loss.backward()
                found = {
                    "loss": loss.detach() * self._gradient_accumulation_steps,
                    "rewards/chosen": chosen.mean(),
                    "rewards/rejected": rejected.mean(),
                    "rewards/accuracies": (chosen > rejected).float().mean(),
                    "log_probs/chosen": policy.chosen_logps.detach().mean(),
                    "log_probs/rejected": policy.rejected_logps.detach().mean(),
                    **{name: tensor.detach().mean() for name, tensor in logits.items()},
                }
                running = {
                    name: running.get(name, 0) + value / self._gradient_accumulation_steps
                    for name, value in found.items()
                }
                if (idx + 1) % self._gradient_accumulation_steps:
                    continue
                if self._is_distributed:
                    for value in running.values():
                        torch.distributed.all_reduce(value)
                if self._clip_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=float(self._clip_grad_norm))
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self._lr_scheduler.step()
                self.global_step += 1
                log_dict = {name: value.item() / self.world_size for name, value in running.items()}
                log_dict["rewards/margins"] = log_dict["rewards/chosen"] - log_dict["rewards/rejected"]
                log_dict["lr"] = get_lr(self._optimizer)
                if self._log_peak_memory_stats:
                    log_dict |= training.get_memory_stats(device=self._device)
                if self._is_rank_zero and self.global_step % self._log_every_n_steps == 0:
                    self._metric_logger.log_dict(log_dict, step=self.global_step)
                running = {}
            self.epochs_run += 1
            self.save_checkpoint(epoch=curr_epoch)

    def cleanup(self) -> None:
        if self._is_rank_zero:
            self._metric_logger.close()
        if self._is_distributed:
            destroy_process_group()


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    if training.is_distributed() and cfg.get("fsdp_cpu_offload", False):
        training.set_torch_num_threads()
    config.log_config(recipe_name="OlderPreferenceRecipe", cfg=cfg)
    recipe = OlderPreferenceRecipe(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
