"""The command weightstream, also python -m jobs: `weightstream JOB ...` runs `python -m jobs.JOB ...`."""

import ast
import re
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

JOBS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.stem.startswith("_")}
COMMANDS = [*JOBS, "help", "completion"]
USAGE = """usage: weightstream JOB [key=value ...]; weightstream JOB --help lists the settings of a job

{jobs}
  help        describes settings of a job or group: weightstream help policy, weightstream help plan sampling
  completion  prints a completion script for bash, zsh or fish: source <(weightstream completion bash)"""


def main() -> None:
    """Dispatches to the job's module. Imports little: the job installs its signal handlers first."""
    match sys.argv[1:]:
        case ["help", *words] if words:
            job, *topics = words if words[0] in JOBS else ["generate", *words]
            sys.argv[1:] = [job, "--help", *topics]
            main()
        case [job, *words] if job in JOBS:
            sys.argv[1:] = words
            runpy.run_module(f"jobs.{job}", run_name="__main__", alter_sys=True)
        case ["completion", *words]:
            from jobs.config.help import completion_output

            if (text := completion_output(words, COMMANDS)) is None:
                exit_refused("completion needs the name of a shell: bash, zsh or fish")
            print(text, end="")
        case ["--help" | "-h" | "help", *_]:
            print(help_text())
        case ["--version", *_]:
            import runtime

            print(f"weightstream {runtime.__version__}")
        case []:
            print(help_text(), file=sys.stderr)
            sys.exit(2)
        case [word, *_]:
            close = get_close_matches(word, COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else "weightstream --help lists them"
            exit_refused(f"unknown job {word!r}: {hint}")


def help_text() -> str:
    """The help text; each job's line is the docstring of its module up to the first full stop or semicolon."""
    texts = {job: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for job, path in JOBS.items()}
    summaries = {job: " ".join(text.split()).partition(": ")[2] for job, text in texts.items()}
    return USAGE.format(jobs="\n".join(f"  {job:<12}{re.split(r'[.;](?: |$)', summaries[job])[0]}" for job in JOBS))


def exit_refused(message: str) -> NoReturn:
    from jobs.config.cli import REFUSED, print_error

    print_error(message)
    sys.exit(REFUSED)


if __name__ == "__main__":
    main()
