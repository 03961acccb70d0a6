"""Version checks."""

import re


def torch_version_ge(version: str) -> bool:
    """Return whether the installed torch is at least ``version`` (numbers only; ``2.13.0+cpu`` counts as 2.13.0).

    Example:
        >>> torchtune.utils.torch_version_ge("2.0.0")
        True
    """
    from importlib.metadata import version as installed

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])

    return numbers(installed("torch")) >= numbers(version)
