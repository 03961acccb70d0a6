"""Compatibility: names the replacement for experiments that recipes copied from earlier releases import."""

raise ImportError(
    "torchtune.dev.rl is not part of this library: its reinforcement learning is in torchtune.rlhf and the recipe "
    "grpo (`tune cp grpo mine.py`); the Ray actors of torchtune.dev.rl.workers do "
    "not come."
)
