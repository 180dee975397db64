"""millrace, which is also python -m jobs: `millrace JOB ...` is `python -m jobs.JOB ...`."""

import ast
import re
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

import runtime
from jobs.config.cli import REFUSED, report
from jobs.config.completion import SHELLS, completions, shell_script

COMPLETION = "completion"


def main() -> None:
    match sys.argv[1:]:
        case []:
            print(help_text(), file=sys.stderr)
            sys.exit(REFUSED)
        case ["--help" | "-h", *_]:
            print(help_text())
        case ["--version", *_]:
            print(f"millrace {runtime.__version__}")
        case [command, "answer", *words] if command == COMPLETION:
            print("".join(f"{answer}\n" for answer in completions(words, [*jobs(), COMPLETION])), end="")
        case [command, shell] if command == COMPLETION and shell in SHELLS:
            print(shell_script(shell), end="")
        case [command, *_] if command == COMPLETION:
            refuse(f"{COMPLETION} takes the name of a shell: {', '.join(SHELLS)}")
        case [job, *words] if job in jobs():
            sys.argv[1:] = words
            runpy.run_module(f"jobs.{job}", run_name="__main__", alter_sys=True)
        case [word, *_]:
            close = get_close_matches(word, [*jobs(), COMPLETION], n=1)
            refuse(f"unknown job {word!r}: {f'did you mean {close[0]}?' if close else 'millrace --help lists them'}")


def jobs() -> dict[str, str]:
    """What each module of this folder says of itself, behind its name and up to the first full stop or semicolon."""
    sources = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("_"))
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in sources}
    return {job: re.split(r"[.;](?:\s|$)", " ".join(text.split()).partition(": ")[2])[0] for job, text in texts.items()}


def help_text() -> str:
    about = {**jobs(), COMPLETION: f"a script for TAB in {' or '.join(SHELLS)}: source <(millrace {COMPLETION} bash)"}
    lines = "\n".join(f"  {job:<12}{line}" for job, line in about.items())
    return f"usage: millrace JOB [key=value ...]\n\n{lines}\n\nmillrace JOB --help lists what a job's settings are."


def refuse(message: str) -> None:
    report(message)
    sys.exit(REFUSED)


if __name__ == "__main__":
    main()
