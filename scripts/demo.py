"""`make demo`: a trained model of 135 million parameters beside the bundled tiny one.

Both answer 24 questions that have one right answer, and 8 prompts, one for each category of the bundled ones. The model
is fetched while the tiny one runs. Runs are resumed, or found finished, when the demo is started again.
"""

import json
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import fill, indent

import pyarrow.parquet as pq

from scripts import trained_model

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("outputs", "generate")
PROMPTS = Path("outputs", "demo", "prompts.jsonl")
NAMES = {"tiny": "the bundled model, 1.7 M parameters", "smollm2": "SmolLM2-135M-Instruct, 135 M parameters"}
FACTS = [
    *("dataset.path=examples/facts.csv", "dataset.id_field=id", 'dataset.template="Q: {question}\\nA:"'),
    *("dataset.few_shot_path=examples/facts_shots.csv", 'dataset.few_shot_template="Q: {question}\\nA: {answer}"'),
    *("dataset.num_examples=4", "sampling.max_new_tokens=6", 'sampling.stop=["\n"]'),
]
CHATS = ["dataset=mtbench", f"dataset.path={PROMPTS}", "dataset.chat_template=true", "sampling.max_new_tokens=32"]
TASKS = {"facts": FACTS, "prompts": CHATS}
NUM_SHOWN, NUM_CHARACTERS = 3, 220


def main() -> int:
    began = time.monotonic()
    write_prompts()
    is_here = (trained_model.HOME / Path(trained_model.MEMBER).name).exists()
    say(
        "The tiny model answers first." if is_here else "Fetching the trained model, 92 MB, while the tiny one answers."
    )
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(trained_model.fetch)
        generate("tiny", "tiny")
        try:
            file = fetching.result()
        except trained_model.UnavailableError as error:
            print(f"error: {error}; `make run` needs no download", file=sys.stderr)
            return 2
    generate("smollm2", str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file))

    say("Right answers to 24 questions, with four examples in the prompt:")
    for model in NAMES:
        scores = weightstream("metrics", str(RUNS / f"demo-{model}-facts"), "reference_field=answer")
        print(f"  {NAMES[model] + ':':<41} {scores.splitlines()[0]}")
    say("Answers to prompts:")
    show_answers()
    say("The four runs:")
    print(weightstream("report", str(RUNS / "demo-*")).strip())
    page = weightstream("report", str(RUNS / "demo-smollm2-prompts")).strip().splitlines()[-1]
    say(f"{page}\n{time.monotonic() - began:.0f} s in all")
    return 0


def say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def weightstream(*words: str) -> str:
    """The output of a command, which is printed first. A command that fails ends the demo with its exit code."""
    print(f"$ weightstream {' '.join(map(quoted, words))}", flush=True)
    command = [sys.executable, "-m", "jobs", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stderr.strip(), file=sys.stderr)
        sys.exit(ended.returncode)
    return ended.stdout


def quoted(word: str) -> str:
    """A word for bash, in one line."""
    return shlex.quote(word) if "\n" not in word else f"$'{word.replace(chr(10), chr(92) + 'n')}'"


def write_prompts() -> None:
    """The first question of each category of the bundled prompts, in MT-Bench's schema."""
    lines = (ROOT / "jobs" / "data" / "sample.jsonl").read_text(encoding="utf-8").splitlines()
    first = {json.loads(line)["category"]: line for line in reversed(lines)}
    path = ROOT / PROMPTS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in reversed(first.values())), encoding="utf-8")


def generate(name: str, model: str) -> None:
    for task, settings in TASKS.items():
        run = f"demo-{name}-{task}"
        weightstream("generate", f"model={model}", *settings, f"run={run}", "log_level=warning")
        summary = json.loads((ROOT / RUNS / run / "summary.json").read_text(encoding="utf-8"))
        print(f"  {summary['issued_tokens']} tokens; {summary['elapsed']['seconds']:.0f} s with its start", flush=True)


def show_answers() -> None:
    """Some prompts that are short, with the answers of both models."""
    columns = ["id", "turns", "completion"]
    folders = {name: ROOT / RUNS / f"demo-{name}-prompts" / "generations" for name in NAMES}
    rows = {name: pq.read_table(folder, columns=columns).to_pylist() for name, folder in folders.items()}
    answers = {name: {row["id"]: row for row in found} for name, found in rows.items()}
    prompts = {row["id"]: json.loads(row["turns"])[0] for row in answers["tiny"].values()}
    for number in sorted(prompts, key=lambda number: len(prompts[number]))[:NUM_SHOWN]:
        print(indent(fill(f"> {shortened(prompts[number])}", 110), "  "))
        for name, rows in answers.items():
            print(indent(fill(f"{name}: {shortened(rows[number]['completion'])}", 106), "      "))


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= NUM_CHARACTERS else f"{line[:NUM_CHARACTERS].rstrip()} ..."


if __name__ == "__main__":
    sys.exit(main())
