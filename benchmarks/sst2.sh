#!/usr/bin/env bash
# SST-2 over 100 non-IID clients with four algorithms: runs/sst2_*-s0, and their report in runs/report-sst2.
# Needs SST-2: a network, or FEDLLM_LOCAL_HUB. After an interruption, start it again: finished runs are not repeated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for algorithm in fadamgc fedadamw localadam localadamw; do
    .venv/bin/fedllm run "recipes/sst2_$algorithm.yaml" eval.every=2
done
.venv/bin/fedllm report runs/sst2_{fadamgc,fedadamw,localadam,localadamw}-s0 --out runs/report-sst2
