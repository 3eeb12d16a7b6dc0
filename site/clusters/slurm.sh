#!/bin/bash
# sbatch docs/clusters/slurm.sh RECIPE [section.key=value ...]
#SBATCH --job-name=fedllm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one torchrun per machine, which starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --requeue                  # a job that lost its machine starts again and goes on from the last checkpoint
#SBATCH --signal=USR1@300          # 300 s before the time limit: end after this round, with a checkpoint

set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

# Slurm sends SIGUSR1 to all processes of the job step. torchrun would die of it, so it starts with the signal ignored;
# fedllm handles it.
srun bash -c 'trap "" USR1; exec torchrun "$@"' torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${PROCESSES_PER_NODE:-8}" \
    --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:${PORT:-29500}" \
    -m fedllm run "$@"
