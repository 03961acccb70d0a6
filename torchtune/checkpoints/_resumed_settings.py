"""The settings that a run may change when it resumes."""

import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._state import damage_named
from torchtune.utils import get_logger, log_rank_zero


class OnResume(Enum):
    """Treatment of a setting that differs from the checkpoint's."""

    NEW = "the new value takes effect"
    KEPT = "the checkpoint's value goes on"
    FIXED = "refused: what is resumed was made from the old value"
    SILENT = "says nothing of the run"


# Every setting of the training recipes; a dotted name has precedence over the setting that contains it. Settings that
# the data loader itself checks, such as the content of a dataset or the product of the batch sizes, may change here.
_SETTINGS = {
    OnResume.SILENT: "recipe resume_from_checkpoint",
    OnResume.KEPT: "seed",
    # The states of optimizer and schedule contain the old values, including the learning rate; the weights and the
    # adapter's scale fit only this model; the position in the data fits only this order.
    OnResume.FIXED: "optimizer optimizer_precision optimizer_in_bwd lr_scheduler policy_model reward_and_value_model "
    "model model_converters quantizer resize_token_embeddings dtype shuffle max_steps_per_epoch num_steps",
    OnResume.NEW: "model.checkpoint_dir "
    "tokenizer dataset dataset_val collate_fn batch_size batch_size_val "
    "gradient_accumulation_steps epochs loss clip_grad_norm run_val_every_n_steps "
    "ref_checkpointer ref_model reference_cache teacher_model teacher_checkpointer "
    "kd_loss kd_ratio teacher_cache image_cache "
    "policy_model.checkpoint_dir reward_and_value_model.checkpoint_dir "
    "value_checkpointer reward_checkpointer ref_policy_checkpointer forward_batch_size top_k "
    "max_generated_tokens temperature stop_token_ids min_response_length penalise_no_eos "
    "reward_penalty kl_coeff whiten_rewards gamma lmbda ppo_epochs ppo_batch_size "
    "num_samples sampler rewards environment max_turns tool_timeout tool_format advantages num_iterations "
    "tokens_per_batch drop_unfinished "
    "output_dir checkpointer save_every_n_steps save_every_n_minutes enable_async_checkpointing "
    "save_adapter_weights_only max_skipped_steps loss_spike_threshold hang_timeout_minutes "
    "device compile cudnn_deterministic_mode share_prefix "
    "enable_activation_checkpointing ac_mode ac_option enable_activation_offloading "
    "enable_fp8_training fp8_recipe_name fake_quant_after_n_steps show_samples_every_n_steps "
    "data_parallel_replicate_dim data_parallel_shard_dim tensor_parallel_dim tensor_parallel_plan "
    "context_parallel_dim expert_parallel_dim fsdp_cpu_offload fsdp_reshard_after_forward "
    "custom_sharded_layers keep_best early_stopping_patience "
    "metric_logger log_every_n_steps log_peak_memory_stats log_level profiler",
}
ON_RESUME = {name: kind for kind, names in _SETTINGS.items() for name in names.split()}
_NOT_SET = "not set"
# Allowed changes of fixed settings, which lose nothing, and their effects.
_EXACT = {
    ("dtype", "bf16", "fp32"): "weights and optimizer states keep their values, and updates are no longer rounded"
}


def check_resumed_settings(cfg: Any, checkpoint: Path) -> None:
    """Compare the settings of a run with the settings in a checkpoint, and log the changes.

    Args:
        cfg: settings of a recipe.
        checkpoint: checkpoint folder with ``torchtune_config.yaml``; if the file is missing, a warning is logged.

    Raises:
        CheckpointError: a setting that the saved state depends on has changed.
    """
    from torchtune.config import to_yaml

    path = checkpoint / "torchtune_config.yaml"
    if not path.is_file():
        log_rank_zero(
            get_logger(),
            f"{path} is missing, so nobody can tell which settings changed: what the checkpoint's states of optimizer "
            "and schedule hold, such as the learning rate, goes on, whatever optimizer and lr_scheduler say now.",
            level=logging.WARNING,
        )
        return
    with damage_named(path):
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path} holds no settings: resume from another checkpoint.")
    # Compare the serialized forms, in which secrets are redacted on both sides.
    now = yaml.safe_load(to_yaml(cfg))
    shared = saved.keys() & now.keys()  # a newer release may have other settings
    found: dict[OnResume, list[str]] = {kind: [] for kind in OnResume}
    for name in sorted(shared):
        for part, old, new in _changes(name, saved[name], now[name]):
            remark = _EXACT.get((part, old, new)) if isinstance(old, str) and isinstance(new, str) else None
            kind = _kind(part) if remark is None else OnResume.NEW
            if kind is not OnResume.KEPT or new is not None:
                found[kind].append(f"{part} was {old} and is {new} now" + (f" ({remark})" if remark else ""))
    if fixed := found[OnResume.FIXED]:
        raise CheckpointError(
            f"{path}: the run cannot go on with other settings than it has: {'; '.join(fixed)}: set "
            f"{'it' if len(fixed) == 1 else 'them'} back, or start a new run from its weights in another output_dir."
        )
    for kind in (OnResume.NEW, OnResume.KEPT):
        if found[kind]:
            log_rank_zero(get_logger(), f"Resumed with other settings, {kind.value}: {'; '.join(found[kind])}.")


def _changes(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, old, new) for every value that differs."""
    for kind, keys in ((Mapping, lambda value: list(value)), (list, lambda value: list(range(len(value))))):
        if isinstance(old, kind) and isinstance(new, kind):
            both = [keys(old), keys(new)]
            for key in dict.fromkeys([*both[0], *both[1]]):
                values = (side[key] if key in known else _NOT_SET for side, known in zip((old, new), both, strict=True))
                yield from _changes(f"{name}.{key}", *values)
            return
    if old != new:
        yield name, old, new


def _kind(name: str) -> OnResume:
    """Return the treatment of a dotted name; a custom recipe's own settings take effect as the recipe reads them."""
    while name not in ON_RESUME and "." in name:
        name = name.rpartition(".")[0]
    return ON_RESUME.get(name, OnResume.NEW)
