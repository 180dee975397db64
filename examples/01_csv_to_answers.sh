#!/usr/bin/env bash
# From a CSV file of questions to a CSV file of answers, and how many of them are right.
# MODEL=... chooses another model: a directory, a GGUF file or a hub id.
set -euo pipefail

cat > questions.csv <<'CSV'
id,question,gold
q1,What is 94 + 78?,172
q2,What is 8 + 5?,13
q3,"Which is larger, 45 or 19?",45
q4,Sort these numbers: 7 3 2 8 6,2 3 6 7 8
CSV

weightstream generate model="${MODEL:-tiny}" dataset.path=questions.csv dataset.template="Q: {question}\nA:" \
    dataset.id_field=id run=answers > summary.txt
head -n 1 summary.txt | tr -s ' '

weightstream export outputs/generate/answers out=answers.csv columns=[id,question,completion,gold]
cat answers.csv

weightstream metrics outputs/generate/answers reference_field=gold
