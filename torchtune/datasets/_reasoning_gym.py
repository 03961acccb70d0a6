"""Problems that reasoning-gym makes."""

from typing import Any

from torchtune.data import DataError
from torchtune.datasets._prompts import PromptDataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.utils import require


def reasoning_gym_dataset(
    tokenizer: ModelTokenizer,
    *,
    environment: str,
    size: int = 1000,
    seed: int = 0,
    new_system_prompt: str | None = None,
    **settings: Any,
) -> PromptDataset:
    """Problems of an environment of ``reasoning-gym`` (extra of the same name), made by a seed.

    Rows have the columns ``question``, ``answer`` and ``metadata``. Where there is one right answer,
    :class:`~torchtune.rlhf.reward_functions.ExactMatch` scores it; else
    :class:`~torchtune.rlhf.reward_functions.ReasoningGymReward`.

    Args:
        tokenizer: tokenizer of the model.
        environment: its name, for example ``chain_sum`` or ``spell_backward``.
        size: number of problems.
        seed: of the problems; another one for validation.
        new_system_prompt: says how to answer.
        **settings: of the environment, for example ``max_terms``.

    Raises:
        DataError: there is no such environment, or it does not take the settings.

    Example:
        >>> dataset = torchtune.datasets.reasoning_gym_dataset(  # doctest: +SKIP
        ...     tokenizer, environment="chain_sum", size=2, max_terms=2
        ... )
        >>> sorted(dataset[0]["row"])  # doctest: +SKIP
        ['answer', 'metadata', 'question']
    """
    gym = require("reasoning_gym", extra="reasoning-gym", purpose="reasoning_gym_dataset")
    try:
        rows = list(gym.create_dataset(environment, size=size, seed=seed, **settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"reasoning_gym_dataset: {environment!r} with size={size} and {settings or 'no settings'} cannot be made "
            f"({error}): correct the name of the environment or its settings."
        ) from error
    return PromptDataset(source=rows, tokenizer=tokenizer, column="question", new_system_prompt=new_system_prompt)
