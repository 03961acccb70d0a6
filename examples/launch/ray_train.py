"""Ray Train: a worker per GPU of a Ray cluster, each of which runs a recipe of yours.

    tune cp full_finetune_distributed my_recipe.py
    python examples/launch/ray_train.py --workers 16 --storage /shared/ray \
        my_recipe.py llama3_1/8B_full output_dir=/shared/run [key=value ...]

Ray starts the processes, tells them who they are (RANK, WORLD_SIZE, MASTER_ADDR, …) and joins them: torchrun's part.
The recipe does the rest, and finds its newest checkpoint when Ray starts the workers anew.
"""

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from torchtune.config import load_and_check
from torchtune.utils import UserError


def train(job: dict[str, Any]) -> None:
    """What each worker does: check the config, and run the recipe with the settings."""
    recipe_main = runpy.run_path(job["recipe"])["recipe_main"]
    recipe_main(load_and_check(job["config"], job["overrides"], recipe_main))


def main() -> None:
    """Check the config, start the workers and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a file that all nodes see")
    parser.add_argument("config", help="a config's name, or a YAML file that all nodes see")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--workers", type=int, required=True, help="one per GPU")
    parser.add_argument("--storage", required=True, help="a folder that all nodes see, for Ray's own records")
    parser.add_argument("--cpu", action="store_true", help="workers have a CPU and no GPU; set device=cpu, too")
    args = parser.parse_args()
    overrides = ["resume_from_checkpoint=True", *args.overrides]
    if not args.recipe.is_file():
        parser.error(f"{args.recipe}: there is no such file: copy a recipe with `tune cp`")
    # A mistake in the config is said here, once: Ray would start the workers three times more to find it again.
    try:
        load_and_check(args.config, overrides, runpy.run_path(str(args.recipe))["recipe_main"])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        import ray.train
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        print("error: Ray Train is not installed: pip install 'torchtune[ray]'.", file=sys.stderr)
        sys.exit(2)
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "recipe": str(args.recipe.resolve()),
            "config": args.config,
            "overrides": overrides,
        },
        torch_config=TorchConfig(backend="gloo" if args.cpu else "cpu:gloo,cuda:nccl"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=not args.cpu),
        run_config=ray.train.RunConfig(
            storage_path=args.storage, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
