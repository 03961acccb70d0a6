"""Ray: a task per part of a config's data, which tokenizes it on any node of a cluster. Then the parts are joined.

    python examples/launch/prepare_ray.py my_config.yaml --output /shared/prepared --shards 16 [key=value ...]

The data, the tokenizer and the output folder lie where all nodes see them. What is finished is reused at the next call.
"""

import argparse
import subprocess
from typing import Any


def prepare(job: dict[str, Any], index: int) -> None:
    """What each task does."""
    shard = f"{index}/{job['shards']}"
    options = ["--output", job["output"], "--shard", shard, "--workers", str(job["cpus"])]
    subprocess.run(["tune", "data", "prepare", job["config"], *job["overrides"], *options], check=True)


def main() -> None:
    """Start a task per shard, wait for all, and join what they wrote."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config's name, or a YAML file that all nodes see")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--output", required=True, help="a folder that all nodes see")
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--cpus", type=int, default=4, help="of each task")
    job = vars(parser.parse_args())
    ray.init()
    task = ray.remote(num_cpus=job["cpus"], max_retries=3)(prepare)
    ray.get([task.remote(job, index) for index in range(job["shards"])])
    subprocess.run(["tune", "data", "merge", job["output"]], check=True)


if __name__ == "__main__":
    main()
