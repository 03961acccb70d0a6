"""A recipe in the older style: it reads a DictConfig as it goes."""

import sys
from typing import Any

from omegaconf import DictConfig

from torchtune import config


class Recipe:
    """Keeps the config and reads it in every way that such recipes do."""

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.batch_size = cfg.batch_size
        self.epochs = cfg["epochs"]
        self.seed = cfg.get("seed", None)
        self.model = config.instantiate(cfg.model)

    def steps(self) -> int:
        """Read late."""
        return self._cfg.inference.max_steps


@config.parse
def recipe_main(cfg: DictConfig) -> Any:
    """Print what arrived."""
    print(f"width={Recipe(cfg).model.width} steps={Recipe(cfg).steps()}")


if __name__ == "__main__":
    sys.exit(recipe_main())
