#!/usr/bin/env bash
# SST-2 over 100 non-IID clients with four algorithms: runs/sst2_*-s0 and a report in benchmarks/sst2/.
# Needs SST-2: a network, or FEDLLM_LOCAL_HUB. Interrupted, it goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for algorithm in fadamgc fedadamw localadam localadamw; do
    .venv/bin/fedllm run "recipes/sst2_$algorithm.yaml" eval.every=2
done
.venv/bin/fedllm report runs/sst2_{fadamgc,fedadamw,localadam,localadamw}-s0 --out benchmarks/sst2
