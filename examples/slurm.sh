#!/bin/bash
# Two machines of eight GPUs each: sbatch examples/slurm.sh run.yaml
# The configuration and the run folder (output.folder) lie on a file system that both machines see.
#SBATCH --job-name=megatrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@900
# TERM, 15 minutes before the time is over: all ranks stop after the same step, with a checkpoint, and a job that is queued
# again goes on from it. --mem=0 is all of a machine's memory, where the state lies.
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600  # seconds for the step under way and its checkpoint
ulimit -l unlimited || echo "host memory cannot be pinned without limit: ask for it, or transfers are slower" >&2

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$first:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m megatrain train "$1" resume=auto
