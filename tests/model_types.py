"""Every model type that transformers generates text with, run beside `generate`: which are exact, which refused.

    python -m tests.model_types [types=llama,t5] [processes=2] [seconds=180] [results=FILE] [tables=gathered]

prints a row for each and the counts; the exit code is 1 where one is WRONG or CRASHES. Exact are greedy tokens, and
log-probabilities of targets within 1e-4. With `results` each answer is
written to FILE as it comes, and those that are there already are not asked for again. With
`tables=gathered`, passes read rows of embedding tables.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformers.models.auto import modeling_auto

from runtime.foreign import deepseek_moe
from tests.isolated import Ended, each_isolated
from tests.model_type_verdict import Outcome, Verdict, judge
from tests.tiny_config_values import VARIANTS

LIMIT_SECONDS = 180.0


def rows() -> list[str]:
    """The model types, and variants of some as "type (variant)"."""
    deepseek_moe.register()
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    encoded = set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    composite = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return sorted(causal | encoded | composite | set(VARIANTS))


def main(arguments: Sequence[str]) -> int:
    options = dict(argument.split("=", 1) for argument in arguments)
    names = options["types"].split(",") if "types" in options else rows()
    file = Path(options["results"]) if "results" in options else None
    known = _known(file)
    tasks = [name for name in names if name not in known]
    answers = each_isolated(
        partial(judge, gather_tables=True) if options.get("tables") == "gathered" else judge,
        tasks,
        num_processes=int(options.get("processes", 2)),
        limit_seconds=float(options.get("seconds", LIMIT_SECONDS)),
    )
    for name, answer in answers:
        verdict = answer if isinstance(answer, Verdict) else _ended(name, answer)
        known[name] = verdict
        _keep(file, verdict)
        print(f"{len(known):4d} {_row(verdict)}", file=sys.stderr, flush=True)
    selected = [known[name] for name in names]
    print("\n".join(map(_row, selected)))
    counts = Counter(verdict.outcome for verdict in selected)
    print(", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome))
    return int(any(verdict.outcome.is_failure for verdict in selected))


def _row(verdict: Verdict) -> str:
    return f"{verdict.name:32} | {verdict.lanes:6} | {verdict.outcome.value}{verdict.note and f': {verdict.note}'}"


def _ended(name: str, ended: Ended) -> Verdict:
    return Verdict(name=name, outcome=Outcome.no_answer if ended.is_late else Outcome.crash, note=ended.why)


def _known(file: Path | None) -> dict[str, Verdict]:
    if file is None or not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    verdicts = [Verdict(**{**line, "outcome": Outcome(line["outcome"])}) for line in lines]
    return {verdict.name: verdict for verdict in verdicts}


def _keep(file: Path | None, verdict: Verdict) -> None:
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps({**vars(verdict), "outcome": verdict.outcome.value}) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
