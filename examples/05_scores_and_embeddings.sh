#!/usr/bin/env bash
# Log-probabilities of given answers, and embeddings of texts. Neither generates a token.
set -euo pipefail

cat > choices.jsonl <<'JSONL'
{"id": "a", "prompt": "Q: What is 7 + 5?\nA:", "options": [" 12", " 11"]}
{"id": "b", "prompt": "Q: Which is larger, 25 or 6?\nA:", "options": [" 25", " 6"]}
JSONL

weightstream score dataset.path=choices.jsonl dataset.id_field=id score.target_field=options run=choices > /dev/null
weightstream encode dataset.path=choices.jsonl dataset.id_field=id encode.pooling=mean encode.normalize=true run=vectors \
    > /dev/null

python - <<'PYTHON'
import pandas as pd

scores = pd.read_parquet("outputs/score/choices/generations").sort_values(["id", "target_index"])
print(scores[["id", "target_index", "logprob", "is_greedy"]].round(2).to_string(index=False))
vectors = pd.read_parquet("outputs/encode/vectors/generations").sort_values("id")["embedding"].to_list()
print(f"{len(vectors)} vectors of {len(vectors[0])} numbers; similarity {vectors[0] @ vectors[1]:.2f}")
PYTHON
