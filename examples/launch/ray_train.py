"""Ray Train: a worker per GPU of a Ray cluster, each of which runs a recipe of yours.

    tune cp full_finetune_distributed my_recipe.py
    python examples/launch/ray_train.py --workers 16 --storage /shared/ray \
        my_recipe.py llama3_1/8B_full output_dir=/shared/run [key=value ...]

Ray starts the processes, tells them who they are (RANK, WORLD_SIZE, MASTER_ADDR, …) and joins them: torchrun's part.
The recipe does the rest, and finds its newest checkpoint when Ray starts the workers anew.
"""

import argparse
import runpy
from pathlib import Path
from typing import Any


def train(job: dict[str, Any]) -> None:
    """What each worker does: check the config, and run the recipe with the settings."""
    from torchtune.config import load_and_check

    recipe_main = runpy.run_path(job["recipe"])["recipe_main"]
    recipe_main(load_and_check(job["config"], job["overrides"], recipe_main))


def main() -> None:
    """Start the workers and wait for them."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a file that all nodes see")
    parser.add_argument("config", help="a config's name, or a YAML file that all nodes see")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--workers", type=int, required=True, help="one per GPU")
    parser.add_argument("--storage", required=True, help="a folder that all nodes see, for Ray's own records")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "recipe": str(args.recipe.resolve()),
            "config": args.config,
            "overrides": ["resume_from_checkpoint=True", *args.overrides],
        },
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=True),
        run_config=ray.train.RunConfig(
            storage_path=args.storage, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
