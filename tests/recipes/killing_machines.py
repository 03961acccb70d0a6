"""Kill machines, agents and ranks of a run, as spot instances are, and come back with other numbers of ranks.

    python -m tests.recipes.killing_machines --kills 20 --seed 0

A machine is an agent of torchrun on this one, with one or two ranks. Each life of the run has one or two of them, and
is killed at a random moment: a rank, an agent, a machine (an agent with its ranks, the one that serves the rendezvous
store included), or all machines. Half of the lives save behind training's back. The other processes must end by
themselves. The next life, with another number of ranks but the same global batch, must go on behind the newest complete
checkpoint. In the end every step has the loss of a run that nobody killed.
"""

import argparse
import itertools
import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.recipes.killing import alive, said, shared_forker, steps_logged, wait_for
from tests.recipes.runs import RECIPES, after_each_step, read_log, write_config
from tests.recipes.test_several_machines import Machines

NAME = "full_finetune_distributed"
SETTINGS = {"epochs": 12, "save_every_n_steps": 3, "checkpointer__keep_last_n_checkpoints": 2}
GLOBAL_BATCH = 4
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # machines, and ranks on each
VICTIMS = ["rank", "agent", "machine", "store", "all"]
PATIENCE = 240.0


def newest_checkpoint(output_dir):
    """Step of the newest complete checkpoint; 0 without any."""
    return max((int(path.parent.name.split("_")[1]) for path in output_dir.glob("step_*/.complete")), default=0)


def steps_of(records):
    """Steps of the records of losses."""
    return [record["step"] for record in records if "loss" in record]


def victims(kind, machines, workers_of, rng):
    """The processes to kill."""
    agent = rng.choice(machines.agents)
    if kind == "rank":
        return [rng.choice(workers_of[agent])]
    if kind == "agent":
        return [agent]
    if kind == "machine":
        return [agent, *workers_of[agent]]
    if kind == "store":
        return [machines.agents[0], *workers_of[machines.agents[0]]]
    return [*machines.agents, *itertools.chain(*workers_of.values())]


def wait_until_ended(pids, what):
    """Wait until processes have ended by themselves."""
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"{what} go on without what was killed"
        time.sleep(0.05)


def kill_and_return(folder, recipe, *, kills, seed):
    """Kill a run until ``kills`` lives have ended so, then let it come to its end.

    Returns:
        how many lives ended how, the losses of each step, and the number of steps that were repeated.
    """
    rng = random.Random(seed)
    ended = Counter()
    repeated = 0
    losses = {}
    steps_of_run = set()
    output_dir = folder / "killed"
    config = write_config(NAME, folder, output_dir, **SETTINGS)
    lives = []  # their agents may still end, which is checked at the end
    run = 0
    while True:
        before = len(read_log(output_dir)) if output_dir.exists() else 0
        saved = newest_checkpoint(output_dir)
        is_killed = ended.total() < kills
        count, ranks = rng.choice(SHAPES)
        machines = Machines(folder / f"life_{len(lives)}", count, ranks)
        machines.folder.mkdir()
        lives.append(machines)
        overrides = [f"batch_size={GLOBAL_BATCH // (count * ranks)}", "resume_from_checkpoint=True"]
        overrides.append(f"enable_async_checkpointing={rng.random() < 0.5}")
        for _ in range(count):
            machines.start(str(recipe), config, *overrides)
        enough = steps_logged(output_dir) + rng.randint(2, 9)
        if is_killed and wait_for(lambda steps=enough: steps_logged(output_dir) >= steps, machines.agents):
            time.sleep(rng.uniform(0, 0.2))
            workers_of = machines.find_all_workers()
            machines.workers = list(itertools.chain(*workers_of.values()))
            kind = rng.choice(VICTIMS)
            for pid in victims(kind, machines, workers_of, rng):
                os.kill(pid, signal.SIGKILL)
            wait_until_ended(machines.workers, f"ranks of life {len(lives)}, {count} x {ranks}, {kind} killed,")
            ended[kind] += 1
            print(f"{ended.total():3} {count} x {ranks} from step {saved}: {kind} killed", flush=True)
        else:
            wait_until_ended(machines.agents, "agents")
        new_steps = steps_of(read_log(output_dir)[before:])
        assert new_steps[:1] in ([], [saved + 1]), f"checkpoint {saved}, but the next life began at {new_steps[0]}"
        for record in read_log(output_dir)[before:]:
            if "loss" not in record:
                continue
            repeated += record["step"] in steps_of_run
            steps_of_run.add(record["step"])
            earlier = losses.setdefault(record["step"], record["loss"])
            assert math.isclose(earlier, record["loss"], rel_tol=1e-3), f"step {record['step']}: {earlier}, {record}"
        if is_killed and not any(map(alive, machines.agents)) and (output_dir / "step_72").exists():
            output_dir.rename(folder / f"whole_{run}")  # came to its end before it was killed: begin another run
            steps_of_run.clear()
            run += 1
        elif not is_killed:
            break
    for machines in lives:
        wait_until_ended(machines.agents, "agents")
        codes = []
        for forker in machines.forkers:
            codes += forker.wait()
        machines.close()
        # Killed, a failure of a rank, or "try again".
        assert set(codes) <= {0, 1, 75, -signal.SIGKILL}, codes
    return ended, losses, repeated


def main():
    """Kill, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ((line, waiting),) = after_each_step("import time; time.sleep(0.15)").items()
        source = (RECIPES / f"{NAME}.py").read_text()
        assert source.count(line) == 1
        recipe = folder / "mine.py"
        recipe.write_text(source.replace(line, waiting))
        config = write_config(NAME, folder, folder / "whole", **SETTINGS, batch_size=GLOBAL_BATCH)
        forker = shared_forker()
        forker.start(NAME, config, ranks=1)
        assert forker.wait() == [0], said(config)
        expected = {record["step"]: record["loss"] for record in read_log(folder / "whole") if "loss" in record}
        print(f"{len(expected)} steps")
        ended, losses, repeated = kill_and_return(folder, recipe, kills=args.kills, seed=args.seed)
    assert sorted(losses) == list(expected)
    largest = max(abs(losses[step] / expected[step] - 1) for step in expected)
    print(f"{ended.total()} kills; no step beyond the newest checkpoint was lost, {repeated} were repeated;")
    print(f"all {len(expected)} losses are those of a run that nobody killed, but for {largest:.1e}")
    for kind, count in sorted(ended.items()):
        print(f"{count:5} {kind}")


if __name__ == "__main__":
    main()
