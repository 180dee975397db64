#!/usr/bin/env bash
# Four tasks of a Slurm array share one run; a job writes its output as one file after they have ended.
# Submit from a directory that all nodes share.
set -euo pipefail

weightstream slurm generate > generate.sbatch
weightstream slurm export > export.sbatch

for i in {1..100}; do echo "{\"prompt\": \"Q: What is $i + $i?\nA:\"}"; done > prompts.jsonl

WEIGHTSTREAM_WORKERS=elastic sbatch --job-name=sums --array=0-3 --cpus-per-task=4 --mem=8G generate.sbatch \
    model="${MODEL:-tiny}" dataset.path=prompts.jsonl run=sums
sbatch --job-name=sums --dependency=singleton export.sbatch run=outputs/generate/sums out=sums.jsonl

echo "weightstream status outputs/generate/sums shows how far the tasks are; then read sums.jsonl"
