"""Compatibility: names the replacement for recipes copied from earlier releases."""

raise ImportError("torchtune.dev.grpo.rewards is not part of this library: use torchtune.rlhf.reward_functions.")
