#!/usr/bin/env bash
# Completions that are JSON of a schema, or one of a few choices. Needs the extra `structured`.
set -euo pipefail

cat > prompts.jsonl <<'JSONL'
{"id": "a", "prompt": "Q: What is 7 + 5?\nA:", "options": [" 12", " 13"]}
{"id": "b", "prompt": "Q: Which is larger, 25 or 6?\nA:", "options": [" 25", " 6"]}
JSONL
cat > schema.json <<'JSON'
{"type": "object", "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["answer"],
 "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}
JSON

weightstream generate dataset.path=prompts.jsonl dataset.id_field=id sampling.json_schema=schema.json run=as-json \
    > /dev/null
weightstream generate dataset.path=prompts.jsonl dataset.id_field=id dataset.choice_field=options run=choices > /dev/null

for run in as-json choices; do
    weightstream export outputs/generate/$run out=$run.jsonl columns=[id,completion] > /dev/null
    cat $run.jsonl
done
