"""A recipe as users wrote them against earlier releases: proximal policy optimisation on one device."""

import math
import sys
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader, DistributedSampler

from torchtune import config, generation, modules, rlhf, training, utils
from torchtune.data import padded_collate
from torchtune.modules import local_kv_cache
from torchtune.recipe_interfaces import FTRecipeInterface
from torchtune.rlhf import PPOStats, Trajectory

log = utils.get_logger("DEBUG")


class OlderPPORecipe(FTRecipeInterface):
    def __init__(self, cfg: DictConfig) -> None:
        self._device = utils.get_device(device=cfg.device)
        self._dtype = training.get_dtype(cfg.dtype, device=self._device)
        self._log_every_n_steps = cfg.get("log_every_n_steps", 1)
        self.seed = training.set_seed(seed=cfg.seed, debug_mode=cfg.get("cudnn_deterministic_mode", None))
        self._rng = torch.Generator(self._device).manual_seed(self.seed)
        self._resume_from_checkpoint = cfg.resume_from_checkpoint
        self.batch_size, self._forward_batch_size = cfg.batch_size, cfg.forward_batch_size
        self._ppo_epochs, self._ppo_batch_size = cfg.ppo_epochs, cfg.ppo_batch_size
        self._gradient_accumulation_steps = cfg.gradient_accumulation_steps
        self._ppo_backward_batch_size = cfg.ppo_batch_size // cfg.gradient_accumulation_steps
        self._kl_coeff, self._gamma, self._lmbda = cfg.kl_coeff, cfg.gamma, cfg.lmbda
        self._whiten_rewards = cfg.whiten_rewards
        self._temperature, self._top_k = cfg.temperature, cfg.top_k
        self._max_generated_tokens = cfg.max_generated_tokens
        self._min_response_length, self._penalise_no_eos = cfg.min_response_length, cfg.penalise_no_eos
        self._reward_penalty = cfg.reward_penalty
        self._total_steps = cfg.num_steps // self.batch_size
        self._steps_run = self._epochs_run = 0

    def setup(self, cfg: DictConfig) -> None:
        self._metric_logger = config.instantiate(cfg.metric_logger)
        self._metric_logger.log_config(cfg)
        self._checkpointer: training.Checkpointer = config.instantiate(
            cfg.checkpointer, resume_from_checkpoint=self._resume_from_checkpoint
        )
        self._value_checkpointer = config.instantiate(cfg.value_checkpointer)
        checkpointers = [config.instantiate(node) for node in (cfg.ref_policy_checkpointer, cfg.reward_checkpointer)]
        policy = self._checkpointer.load_checkpoint()
        reference, reward = (node.load_checkpoint()[training.MODEL_KEY] for node in checkpointers)
        value = self._value_checkpointer.load_checkpoint()[training.MODEL_KEY]
        self._tokenizer = config.instantiate(cfg.tokenizer)
        self._policy_model = self._setup_model(cfg, cfg.policy_model, policy[training.MODEL_KEY])
        self._ref_policy_model = self._setup_model(cfg, cfg.policy_model, reference, is_frozen=True)
        self._value_model = self._setup_model(cfg, cfg.reward_and_value_model, value, is_classifier=True)
        self._reward_model = self._setup_model(
            cfg, cfg.reward_and_value_model, reward, is_frozen=True, is_classifier=True
        )
        parameters = [*self._policy_model.parameters(), *self._value_model.parameters()]
        self._optimizer = config.instantiate(cfg.optimizer, parameters)
        self._loss_fn = config.instantiate(cfg.loss)
        self._stop_token_ids = torch.tensor(
            list(cfg.get("stop_token_ids", None) or self._tokenizer.stop_tokens), device=self._device
        )
        self._sampler, self._dataloader = self._setup_data(cfg.dataset, cfg.shuffle, cfg.batch_size)
        self._total_epochs = math.ceil(self._total_steps / len(self._dataloader))
        self._profiler = training.DummyProfiler()

    def _setup_model(
        self,
        cfg: DictConfig,
        cfg_model: DictConfig,
        state: dict[str, Any],
        is_frozen: bool = False,
        is_classifier: bool = False,
    ) -> torch.nn.Module:
        with training.set_default_dtype(self._dtype), self._device:
            model = config.instantiate(cfg_model)
        if not is_frozen:
            training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        if is_classifier:
            training.update_state_dict_for_classifier(state, model.named_parameters())
        model.load_state_dict(state)
        training.validate_expected_param_dtype(model.named_parameters(), dtype=self._dtype)
        training.disable_dropout(model)
        if is_frozen:
            model.eval()
            for parameter in model.parameters():
                parameter.requires_grad = False
        return model

    def _setup_data(self, cfg_dataset: Any, shuffle: bool, batch_size: int) -> tuple[DistributedSampler, DataLoader]:
        ds = config.instantiate(cfg_dataset, tokenizer=self._tokenizer)
        sampler = DistributedSampler(ds, num_replicas=1, rank=0, shuffle=shuffle, seed=self.seed)
        return sampler, DataLoader(
            dataset=ds,
            sampler=sampler,
            batch_size=batch_size,
            drop_last=True,
            collate_fn=partial(
                padded_collate,
                pad_direction="left",
                keys_to_pad=["tokens", "labels"],
                padding_idx=self._tokenizer.pad_id,
            ),
        )

    def generate_trajectory(self, input_ids: torch.Tensor) -> Trajectory:
        context_length = input_ids.shape[1]
        length = context_length + self._max_generated_tokens
        cache = {"batch_size": self._forward_batch_size, "dtype": self._dtype, "decoder_max_seq_len": length}
        with local_kv_cache(model=self._policy_model, device=self._device, **cache):
            query_responses, logits = generation.generate(
                model=self._policy_model,
                prompt=input_ids,
                max_generated_tokens=self._max_generated_tokens,
                temperature=self._temperature,
                top_k=self._top_k,
                pad_id=self._tokenizer.pad_id,
                rng=self._rng,
                stop_tokens=self._tokenizer.stop_tokens,
            )
        responses = query_responses[:, context_length:].clone()
        padding_masks = query_responses != self._tokenizer.pad_id
        masks = generation.get_causal_mask_from_padding_mask(padding_masks)
        position_ids = generation.get_position_ids_from_padding_mask(padding_masks)
        logprobs = rlhf.logits_to_logprobs(logits, responses, self._temperature)
        ref_logits = self._ref_policy_model(query_responses, input_pos=position_ids, mask=masks)
        ref_logits = rlhf.truncate_sequence_for_logprobs(ref_logits, context_length)
        ref_logprobs = rlhf.logits_to_logprobs(ref_logits, responses, self._temperature)
        values = self._value_model(query_responses, input_pos=position_ids, mask=masks)
        values = rlhf.truncate_sequence_for_logprobs(values, context_length).squeeze(-1)
        response_padding_masks, responses = rlhf.truncate_sequence_at_first_stop_token(
            responses, self._stop_token_ids, self._tokenizer.pad_id
        )
        seq_lens = training.get_unmasked_sequence_lengths(response_padding_masks)
        scores = self._reward_model(
            torch.cat([input_ids, responses], dim=1), input_pos=position_ids, mask=masks
        ).squeeze(-1)
        scores = scores.gather(1, (seq_lens + context_length)[:, None]).squeeze(-1)
        penalised = rlhf.get_reward_penalty_mask(
            response_padding_masks, seq_lens, self._penalise_no_eos, self._min_response_length
        )
        scores[penalised] = self._reward_penalty
        logprobs = logprobs.masked_fill(response_padding_masks, 1.0)
        ref_logprobs = ref_logprobs.masked_fill(response_padding_masks, 1.0)
        value_seq_idxs = torch.where(
            (seq_lens > 0) & (seq_lens < self._max_generated_tokens - 1), seq_lens + 1, seq_lens
        )
        value_padding_masks = response_padding_masks.clone().scatter_(1, value_seq_idxs.unsqueeze(-1), False)
        values = values.masked_fill(value_padding_masks, 0.0)
        return Trajectory(
            query_responses=query_responses,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
            masks=masks,
            position_ids=position_ids,
            response_padding_masks=response_padding_masks,
            value_padding_masks=value_padding_masks,
            value_seq_idxs=value_seq_idxs,
            scores=scores,
            seq_lens=seq_lens,
        )

    def generate_trajectory_batched(self, input_ids: torch.Tensor) -> Trajectory:
        parts = []
        with torch.no_grad():
            for start in range(0, self.batch_size, self._forward_batch_size):
                parts.append(self.generate_trajectory(input_ids[start : start + self._forward_batch_size]))
        return Trajectory(*map(torch.cat, zip(*parts, strict=True)))

    def ppo_step(self, part: Trajectory, advantages: torch.Tensor, returns: torch.Tensor, context: int) -> PPOStats:
        logits = self._policy_model(part.query_responses, input_pos=part.position_ids, mask=part.masks)
        logits = rlhf.truncate_sequence_for_logprobs(logits, context)
        logprobs = rlhf.logits_to_logprobs(logits, part.query_responses[:, context:], self._temperature)
        logprobs = logprobs.masked_fill(part.response_padding_masks, 1.0)
        values = self._value_model(part.query_responses, input_pos=part.position_ids, mask=part.masks)
        values = rlhf.truncate_sequence_for_logprobs(values, context).squeeze(-1)
        values = values.masked_fill(part.value_padding_masks, 0.0)
        loss, policy_loss, value_loss, ratios, clipfrac = self._loss_fn(
            part.logprobs,
            logprobs,
            advantages,
            part.values,
            values,
            returns,
            padding_masks=~part.response_padding_masks,
            value_padding_masks=~part.value_padding_masks,
        )
        (loss / self._gradient_accumulation_steps).backward()
        with torch.no_grad():
            approx_policy_kls = (0.5 * (logprobs - part.logprobs).pow(2)).mean()
        return PPOStats(loss, policy_loss, value_loss, ratios, clipfrac, approx_policy_kls)

    def train(self) -> None:
        training.cleanup_before_training()
        for curr_epoch in range(self._epochs_run, self._total_epochs):
            self._sampler.set_epoch(curr_epoch)
            for batch in self._dataloader:
                tokens = batch["tokens"].to(self._device)
                context = tokens.shape[1]
                trajectory = self.generate_trajectory_batched(tokens)
                rewards, kl, kl_rewards = rlhf.get_rewards_ppo(
                    trajectory.scores,
                    trajectory.logprobs,
                    trajectory.ref_logprobs,
                    self._kl_coeff,
                    trajectory.value_seq_idxs,
                )
                if self._whiten_rewards:
                    rewards = rlhf.whiten(rewards, mask=~trajectory.response_padding_masks)
                advantages, returns = rlhf.estimate_advantages(
                    trajectory.values, rewards, self._gamma, self._lmbda, masks=~trajectory.response_padding_masks
                )
                stats = []
                for _ in range(self._ppo_epochs):
                    order = torch.randperm(self.batch_size, generator=self._rng, device=self._device)
                    for indices in order.split(self._ppo_batch_size):
                        for at in indices.split(self._ppo_backward_batch_size):
                            part = Trajectory(*(values[at] for values in trajectory))
                            stats.append(self.ppo_step(part, advantages[at], returns[at], context))
                        self._optimizer.step()
                        self._optimizer.zero_grad(set_to_none=True)
                self._steps_run += 1
                if self._steps_run % self._log_every_n_steps == 0:
                    means = PPOStats(*(torch.stack(values).mean().item() for values in zip(*stats, strict=True)))
                    log_dict = {
                        "scores": trajectory.scores.mean(),
                        "rlhf_reward": rewards.sum(1).mean(),
                        "kl": kl.sum(1).mean(),
                        "kl_reward": kl_rewards.sum(1).mean(),
                        "response_lengths": trajectory.seq_lens.float().mean(),
                        **means._asdict(),
                    }
                    self._metric_logger.log_dict(log_dict, step=self._steps_run)
                if self._steps_run == self._total_steps:
                    break
            self._epochs_run += 1
            self.save_checkpoint(curr_epoch, is_intermediate_checkpoint=self._epochs_run < self._total_epochs)

    def save_checkpoint(self, epoch: int, is_intermediate_checkpoint: bool) -> None:
        policy: dict[str, Any] = {training.MODEL_KEY: self._policy_model.state_dict()}
        value = {training.MODEL_KEY: self._value_model.state_dict()}
        if is_intermediate_checkpoint:
            policy |= {
                training.EPOCHS_KEY: self._epochs_run,
                training.TOTAL_EPOCHS_KEY: self._total_epochs,
                training.MAX_STEPS_KEY: self._total_steps,
                training.STEPS_KEY: self._steps_run,
                training.SEED_KEY: self.seed,
                training.RNG_KEY: self._rng.get_state(),
                training.OPT_KEY: self._optimizer.state_dict(),
            }
        self._checkpointer.save_checkpoint(policy, epoch=epoch, intermediate_checkpoint=is_intermediate_checkpoint)
        self._value_checkpointer.save_checkpoint(value, epoch=epoch, intermediate_checkpoint=False)

    def cleanup(self) -> None:
        self._metric_logger.close()


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    config.log_config(recipe_name="OlderPPORecipe", cfg=cfg)
    recipe = OlderPPORecipe(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
