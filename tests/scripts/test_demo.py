"""`make demo` without its model: the prompts that it asks, the commands that it prints, and what it says offline."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from scripts import demo, trained_model


def test_it_asks_a_question_of_each_category(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    source = Path(__file__).resolve().parents[2] / "jobs" / "data"
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "data").symlink_to(source)
    demo.write_prompts()
    rows = [json.loads(line) for line in (tmp_path / demo.PROMPTS).read_text().splitlines()]
    assert len(rows) == len({row["category"] for row in rows}) == 8


@pytest.mark.parametrize("word", ["run=x", 'dataset.template="Q: {question}\\nA:"', 'sampling.stop=["\n"]', "a b"])
def test_a_printed_command_is_one_line_that_bash_reads_as_it_was(word: str) -> None:
    printed = demo.quoted(word)
    assert "\n" not in printed
    read = subprocess.run(["bash", "-c", f"printf %s {printed}"], capture_output=True, text=True, check=True).stdout
    assert read == word


def test_the_example_of_few_shots_asks_as_the_demo_does() -> None:
    words = shlex.split((Path(demo.__file__).parents[1] / "examples" / "03_few_shot_evaluation.sh").read_text())
    assert {"dataset.num_examples=4", "sampling.max_new_tokens=6"} <= {word.strip(")") for word in words}
    assert {"dataset.num_examples=4", "sampling.max_new_tokens=6"} <= set(demo.FACTS)


def test_without_the_model_it_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch() -> Path:
        raise trained_model.UnavailableError("no index here gives it")

    monkeypatch.setattr(trained_model, "fetch", fetch)
    monkeypatch.setattr(demo, "generate", lambda name, model: None)
    monkeypatch.setattr(demo, "write_prompts", lambda: None)
    assert demo.main() == 2
    assert capsys.readouterr().err == "error: no index here gives it; `make run` needs no download\n"
