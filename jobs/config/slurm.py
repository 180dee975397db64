"""Slurm scripts in the package's data: their list and their text, for `weightstream slurm`."""

import shlex
import sys
from importlib.resources import files

SCRIPTS = {
    "generate": "runs weightstream generate as a job array: shards of a data set, or workers of one run",
    "export": "writes the output of a run as one file, after the array has ended",
}
MAIN_SCRIPT = "generate"
_INTERPRETER = "default_python=.venv/bin/python"  # a line of each script

_LISTING = """usage: weightstream slurm NAME > FILE; then sbatch [OPTION ...] FILE [key=value ...]

{scripts}

NAME may be left out if stdout is redirected: weightstream slurm > job.sbatch writes the script {main}.
The scripts use the Python that wrote them. Adapt their #SBATCH lines, or override them with options of sbatch.

Four workers share one run, then its output is exported:
  weightstream slurm generate > generate.sbatch
  weightstream slurm export > export.sbatch
  WEIGHTSTREAM_WORKERS=elastic sbatch --job-name=prompts --array=0-3 generate.sbatch run=prompts dataset.path=a.jsonl
  sbatch --job-name=prompts --dependency=singleton export.sbatch run=outputs/generate/prompts out=answers.jsonl"""


def script_listing() -> str:
    """The usage of `weightstream slurm`, with a line for each script."""
    lines = [f"  {name:<10}{summary}" for name, summary in SCRIPTS.items()]
    return _LISTING.format(scripts="\n".join(lines), main=MAIN_SCRIPT)


def script_text(name: str, interpreter: str = sys.executable) -> str:
    """The text of a script in `SCRIPTS`, which calls `interpreter` unless WEIGHTSTREAM_PYTHON is set."""
    text = files("jobs").joinpath("data", "slurm", f"{name}.sbatch").read_text(encoding="utf-8")
    assert text.count(_INTERPRETER) == 1
    return text.replace(_INTERPRETER, f"default_python={shlex.quote(interpreter)}")
