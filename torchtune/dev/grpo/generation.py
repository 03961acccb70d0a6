"""Compatibility: names the replacement for recipes copied from earlier releases."""

raise ImportError("torchtune.dev.grpo.generation is not part of this library: use torchtune.rlhf.LocalSampler.")
