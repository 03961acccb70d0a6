#!/bin/bash
# Slurm: one launcher per node, which starts a process per GPU.
#
#   sbatch --nodes 2 examples/launch/slurm.sh llama3_3/70B_full output_dir=/shared/run [key=value ...]
#
# The output folder, the model and the data lie where all nodes see them. Ten minutes before the time limit, and when
# the job is preempted, every process gets SIGTERM: the run saves and ends with 75, and the job is queued again under
# the same number. It then goes on from its newest checkpoint, as it does after a node has failed.

#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -u
config=${1:?usage: sbatch slurm.sh CONFIG [key=value ...]}
shift

# The launchers meet at the first node; a port by job number lets jobs share a node.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

srun --kill-on-bad-exit=0 tune run \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$head:$port" \
    --max-restarts 3 \
    --config "$config" \
    resume_from_checkpoint=True \
    "$@"
code=$?

if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
