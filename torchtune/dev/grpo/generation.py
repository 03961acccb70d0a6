"""Compatibility: says what recipes copied from earlier releases use in its place."""

raise ImportError("torchtune.dev.grpo.generation is not part of this library: use torchtune.rlhf.LocalSampler.")
