"""The command weightstream, also python -m jobs: `weightstream JOB ...` runs `python -m jobs.JOB ...`."""

import ast
import re
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

JOBS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.stem.startswith("_")}
COMMANDS = [*JOBS, "slurm", "help", "completion"]
USAGE = """usage: weightstream JOB [key=value ...]; weightstream JOB --help lists the settings of a job

{jobs}
  slurm       prints scripts for sbatch: weightstream slurm > job.sbatch; weightstream slurm --help lists them
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
        case ["slurm", *words]:
            print_slurm_script(words)
        case ["--help" | "-h" | "help", *_]:
            from jobs.config.screen import fold_for_screen

            print(fold_for_screen(help_text()))
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


def print_slurm_script(words: list[str]) -> None:
    """Prints the script that `words` name. Without a name, the list of scripts goes to stderr and, unless stdout is a
    terminal, the main script to stdout."""
    from jobs.config.cli import print_line
    from jobs.config.screen import fold_for_screen
    from jobs.config.slurm import MAIN_SCRIPT, SCRIPTS, script_listing, script_text
    from runtime.errors import OutputError

    try:
        match words:
            case ["--help" | "-h"]:
                print_line(fold_for_screen(script_listing()))
            case [name] if name in SCRIPTS:
                print_line(script_text(name).rstrip())
            case []:
                print(script_listing(), file=sys.stderr)
                if not sys.stdout.isatty():
                    print_line(script_text(MAIN_SCRIPT).rstrip())
            case _:
                exit_refused(f"slurm takes the name of one script, {' or '.join(SCRIPTS)}, got {' '.join(words)!r}")
    except OutputError as error:
        exit_refused(str(error), error.exit_code)


def help_text() -> str:
    """The help text; each job's line is the docstring of its module up to the first full stop or semicolon."""
    texts = {job: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for job, path in JOBS.items()}
    summaries = {job: " ".join(text.split()).partition(": ")[2] for job, text in texts.items()}
    return USAGE.format(jobs="\n".join(f"  {job:<12}{re.split(r'[.;](?: |$)', summaries[job])[0]}" for job in JOBS))


def exit_refused(message: str, code: int | None = None) -> NoReturn:
    """Prints an error and exits with `code`, by default that of a refused command."""
    from jobs.config.cli import REFUSED, print_error

    print_error(message)
    sys.exit(REFUSED if code is None else code)


if __name__ == "__main__":
    main()
