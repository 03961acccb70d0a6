"""Compatibility: says what became of the experiments that recipes copied from earlier releases import from here."""

raise ImportError(
    "torchtune.dev is not part of this library: its reinforcement learning (torchtune.dev.rl, torchtune.dev.grpo) "
    "comes with the recipes of a later release; the Ray actors of torchtune.dev.rl.workers do not come."
)
