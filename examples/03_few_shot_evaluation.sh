#!/usr/bin/env bash
# Accuracy on your own questions, without and with examples in the prompt. `make demo` does the same with a trained model.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

common=(model="${MODEL:-tiny}" dataset.path="$here/facts.csv" dataset.id_field=id dataset.template="Q: {question}\nA:"
    sampling.max_new_tokens=6 $'sampling.stop=["\n"]')
examples=(dataset.few_shot_path="$here/facts_shots.csv" 'dataset.few_shot_template="Q: {question}\nA: {answer}"'
    dataset.num_examples=4)

weightstream generate "${common[@]}" run=zero-shot > /dev/null
weightstream generate "${common[@]}" "${examples[@]}" run=four-shot > /dev/null

for run in zero-shot four-shot; do
    echo "$run"
    weightstream metrics outputs/generate/$run reference_field=answer metric=exact_match | head -n 1
done
