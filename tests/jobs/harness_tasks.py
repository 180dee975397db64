"""Tasks of a harness over made-up data, written where a test wants them: of each kind of requests, with examples and
stop strings."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ROWS = [
    {
        "question": f"what is {a} and {b} more",
        "text": f"{a} {b}",
        "choices": list(NUMBERS[i : i + 3]),
        "answer": i % 3,
    }
    for i, (a, b) in enumerate(pairwise(NUMBERS[:9]))
]


def write_tasks(folder: Path, rows: Sequence[Mapping[str, object]] = ROWS) -> None:
    """Writes the files of `TASKS` and of their rows."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(name=name, data=folder / "rows.jsonl"))


_HEAD = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
fewshot_split: train
"""
_CHOICE = """output_type: multiple_choice
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
_UNTIL = """output_type: generate_until
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_target: "{{{{choices[answer]}}}}"
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
TASKS = {
    "choice_of_words": _HEAD + _CHOICE + "doc_to_choice: choices\n",
    "choice_of_letters": _HEAD + _CHOICE + 'doc_to_choice: ["A", "B", "C"]\n',
    "choice_with_examples": _HEAD + _CHOICE + "doc_to_choice: choices\nnum_fewshot: 2\n",
    "perplexity": _HEAD
    + """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}, {{{{text}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
""",
    "until_a_stop": _HEAD + _UNTIL + 'generation_kwargs: {{until: ["e", "\\n\\n"], max_gen_toks: 12}}\n',
    "until_the_end": _HEAD + _UNTIL + "generation_kwargs: {{until: [], max_gen_toks: 9}}\nnum_fewshot: 1\n",
}
