"""Compatibility: says what became of the experiments that recipes copied from earlier releases import from here."""

raise ImportError(
    "torchtune.dev.rl is not part of this library: its reinforcement learning is in torchtune.rlhf and the recipe "
    "grpo (`tune cp grpo mine.py`); the Ray actors of torchtune.dev.rl.workers do "
    "not come."
)
