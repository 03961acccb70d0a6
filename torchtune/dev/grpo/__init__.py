"""Former names of GRPO, for configs: thin ones around :mod:`torchtune.rlhf` and :mod:`torchtune.datasets`.

Recipes that were copied then keep the loop in their own way, with ``generate`` that returns logits, padded rollouts
and rewards of token tensors: these have no counterpart here. `tune cp grpo mine.py` is the place to
begin again.
"""
