#!/bin/bash
# Slurm: a job array, each task of which tokenizes one of SHARDS parts of a config's data. Then the parts are joined.
#
#   job=$(sbatch --parsable --array=0-15 examples/launch/prepare_slurm.sh 16 my_config.yaml /shared/prepared)
#   sbatch --dependency="afterok:$job" --wrap "tune data merge /shared/prepared"
#
# The data, the tokenizer and the output folder lie where all nodes see them. If some tasks fail, submit these alone
# (--array=3,7): what is finished is reused, and what was interrupted goes on.

#SBATCH --job-name=prepare
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.out

set -u
usage="usage: sbatch --array=0-15 prepare_slurm.sh SHARDS CONFIG OUTPUT [key=value ...]"
shards=${1:?$usage}
config=${2:?$usage}
output=${3:?$usage}
shift 3

exec tune data prepare "$config" "$@" \
    --output "$output" \
    --shard "$SLURM_ARRAY_TASK_ID/$shards" \
    --workers "$SLURM_CPUS_PER_TASK"
