"""datatrove: its executors tokenize a part of a config's data per task, on this machine or on Slurm.

    python examples/launch/prepare_datatrove.py my_config.yaml --output /shared/prepared --shards 16 [key=value ...]
    tune data merge /shared/prepared

The executor reruns what is not finished: its own records say which tasks ended, in the folder logs of the output.
For Slurm, put a SlurmPipelineExecutor (with time and partition) in the place of the local one.
"""

import argparse
import subprocess
from functools import partial
from pathlib import Path
from typing import Any


def prepare(data: Any, rank: int, world_size: int, *, job: dict[str, Any]) -> None:
    """The pipeline's only step: what a task does, number ``rank`` of ``world_size``."""
    options = ["--output", job["output"], "--shard", f"{rank}/{world_size}", "--workers", str(job["cpus"])]
    subprocess.run(["tune", "data", "prepare", job["config"], *job["overrides"], *options], check=True)


def main() -> None:
    """Run the pipeline on this machine."""
    from datatrove.executor import LocalPipelineExecutor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config's name, or the path of a YAML file")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--output", required=True, help="a folder that all tasks see")
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--at-once", type=int, default=4, help="tasks that run side by side")
    parser.add_argument("--cpus", type=int, default=4, help="of each task")
    job = vars(parser.parse_args())
    executor = LocalPipelineExecutor(
        pipeline=[partial(prepare, job=job)],
        tasks=job["shards"],
        workers=job["at_once"],
        logging_dir=str(Path(job["output"]) / "logs"),
    )
    executor.run()


if __name__ == "__main__":
    main()
