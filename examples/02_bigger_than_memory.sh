#!/usr/bin/env bash
# A model that is larger than its memory budget: plan the run, then run it.
set -euo pipefail

# What does Mixtral 8x7B need on a T4 with its host, and how fast would it be? Neither weights nor a T4 are needed.
weightstream plan model=mixtral machine=t4 > plan.txt
grep -E "^(device|host) memory|^  total  |^  weights  " plan.txt

# A Mixtral of 56 MiB with random weights stands in for a large one, and a budget of 123 MiB for a small machine.
weightstream synthesize model=mixtral architecture.hidden_size=256 architecture.intermediate_size=512 \
    architecture.num_hidden_layers=4 out=small-mixtral > /dev/null
for i in {1..12}; do echo "{\"prompt\": \"Question $i: what is $i plus $i?\"}"; done > prompts.jsonl
run=(model=small-mixtral dataset.path=prompts.jsonl sampling.max_new_tokens=8)

weightstream generate "${run[@]}" offload.host_memory_gib=0.12 run=budget > summary.txt 2> log.txt
grep -E "rows ok|read from disk" summary.txt | tr -s ' '

# A budget that cannot hold the run is refused before any weight is read.
weightstream generate "${run[@]}" offload.host_memory_gib=0.06 run=refused > /dev/null 2> refused.txt ||
    echo "exit code $?: $(grep '^error' refused.txt)"
