"""Which settings of a run may change when it is resumed; decided here only."""

import logging
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.utils import get_logger, log_rank_zero


class OnResume(Enum):
    """What happens with a setting that differs from the checkpoint's."""

    NEW = "the new value takes effect"
    KEPT = "the checkpoint's value goes on"
    FIXED = "refused: what is resumed was made from the old value"
    SILENT = "says nothing of the run"


def _of(kind: OnResume, names: str) -> dict[str, OnResume]:
    return dict.fromkeys(names.split(), kind)


# Every setting of the training recipes; a dotted name has precedence over the setting that contains it. Settings that
# the data loader checks, such as the content of a dataset or the product of the batch sizes, may change here.
ON_RESUME: dict[str, OnResume] = {
    **_of(OnResume.SILENT, "recipe resume_from_checkpoint"),
    **_of(OnResume.KEPT, "seed"),
    # The states of optimizer and schedule hold the old values, also those of the learning rate.
    **_of(OnResume.FIXED, "optimizer optimizer_precision optimizer_in_bwd lr_scheduler"),
    # The weights, and the adapter's scale, are of this model.
    **_of(OnResume.FIXED, "policy_model reward_and_value_model"),
    **_of(OnResume.FIXED, "model model_converters quantizer resize_token_embeddings dtype"),
    **_of(OnResume.NEW, "model.checkpoint_dir"),
    # The position in the data would mean another one.
    **_of(OnResume.FIXED, "shuffle max_steps_per_epoch num_steps"),
    **_of(OnResume.NEW, "tokenizer dataset dataset_val collate_fn batch_size batch_size_val"),
    **_of(OnResume.NEW, "gradient_accumulation_steps epochs loss clip_grad_norm run_val_every_n_steps"),
    **_of(OnResume.NEW, "ref_checkpointer ref_model reference_cache teacher_model teacher_checkpointer"),
    **_of(OnResume.NEW, "kd_loss kd_ratio teacher_cache"),
    **_of(OnResume.NEW, "policy_model.checkpoint_dir reward_and_value_model.checkpoint_dir"),
    **_of(OnResume.NEW, "value_checkpointer reward_checkpointer ref_policy_checkpointer forward_batch_size top_k"),
    **_of(OnResume.NEW, "max_generated_tokens temperature stop_token_ids min_response_length penalise_no_eos"),
    **_of(OnResume.NEW, "reward_penalty kl_coeff whiten_rewards gamma lmbda ppo_epochs ppo_batch_size"),
    **_of(OnResume.NEW, "num_samples sampler rewards advantages num_iterations tokens_per_batch drop_unfinished"),
    **_of(OnResume.NEW, "output_dir checkpointer save_every_n_steps save_every_n_minutes enable_async_checkpointing"),
    **_of(OnResume.NEW, "save_adapter_weights_only max_skipped_steps loss_spike_threshold hang_timeout_minutes"),
    **_of(OnResume.NEW, "device compile cudnn_deterministic_mode share_prefix"),
    **_of(OnResume.NEW, "enable_activation_checkpointing ac_mode ac_option enable_activation_offloading"),
    **_of(OnResume.NEW, "enable_fp8_training fp8_recipe_name fake_quant_after_n_steps show_samples_every_n_steps"),
    **_of(OnResume.NEW, "data_parallel_replicate_dim data_parallel_shard_dim tensor_parallel_dim tensor_parallel_plan"),
    **_of(OnResume.NEW, "context_parallel_dim expert_parallel_dim fsdp_cpu_offload fsdp_reshard_after_forward"),
    **_of(OnResume.NEW, "custom_sharded_layers keep_best early_stopping_patience"),
    **_of(OnResume.NEW, "metric_logger log_every_n_steps log_peak_memory_stats log_level profiler"),
}
_NOT_SET = "not set"
# Changes of a fixed setting that lose nothing, with what they mean.
_EXACT = {
    ("dtype", "bf16", "fp32"): "weights and optimizer states keep their values, and updates are no longer rounded"
}


def check_resumed_settings(cfg: Any, checkpoint: Path) -> None:
    """Compare the settings of a run with those that a checkpoint was saved with, and log what changes.

    Args:
        cfg: settings of a recipe.
        checkpoint: a folder with ``torchtune_config.yaml``; without it there is nothing to compare, which is
            logged as a warning.

    Raises:
        CheckpointError: a setting changed on which the saved state depends.
    """
    from torchtune.config._save import to_yaml

    path = checkpoint / "torchtune_config.yaml"
    if not path.is_file():
        log_rank_zero(
            get_logger(),
            f"{path} is missing, so nobody can tell which settings changed: what the checkpoint's states of optimizer "
            "and schedule hold, such as the learning rate, goes on, whatever optimizer and lr_scheduler say now.",
            level=logging.WARNING,
        )
        return
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from another checkpoint.") from error
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path} holds no settings: resume from another checkpoint.")
    # Both as they are written: what a file replaces, such as secrets, is the same on either side.
    now = yaml.safe_load(to_yaml(cfg))
    shared = saved.keys() & now.keys()  # a newer release may have others
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
    """(dotted name, old, new) of every value that differs."""
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
    """What holds for a dotted name; a setting of somebody's own recipe takes effect as the recipe reads it."""
    while name not in ON_RESUME and "." in name:
        name = name.rpartition(".")[0]
    return ON_RESUME.get(name, OnResume.NEW)
