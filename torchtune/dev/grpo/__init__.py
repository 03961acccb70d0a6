"""Former names of GRPO, for configs: thin wrappers of :mod:`torchtune.rlhf` and :mod:`torchtune.datasets`.

Recipes copied from earlier releases use ``generate`` with logits, padded rollouts and rewards of token tensors;
these have no counterpart here. To port one, start from `tune cp grpo mine.py`.
"""
