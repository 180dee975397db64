"""The kit for a first card: what it names is there, and its halves fit the time of a lent machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.gpu import probe

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "tests" / "gpu" / "gpu_kit.sh"
TEXT = KIT.read_text(encoding="utf-8")
MOST_SECONDS = 580  # of a command on a lent machine, which has ten minutes


def body_of(function: str) -> str:
    match = re.search(rf"^{function}\(\) {{(.*?)^}}", TEXT, re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


@pytest.mark.parametrize("half", ["first", "second"])
def test_the_limits_of_a_half_s_steps_fit_its_time_and_are_those_it_says(half: str) -> None:
    limits = [int(seconds) for seconds in re.findall(r"\b(?:step|tests) (\d+) \w+\.txt", body_of(half))]
    assert len(limits) >= 3
    assert sum(limits) <= MOST_SECONDS
    for page in (TEXT, (ROOT / "docs" / "how-to" / "gpu-first-run.md").read_text(encoding="utf-8")):
        assert re.search(rf"gpu_kit\.sh {half} .*\b{sum(limits)} s at most", page)


def test_what_must_have_the_card_for_itself_is_a_test_of_a_card() -> None:
    files = re.search(r'^TESTS="(.*)"', TEXT, re.MULTILINE)
    assert files is not None
    trees = [ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in files[1].split()]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    words = re.findall(r"\w+", " ".join(re.findall(r'^ALONE="(?:\(\$ALONE )?(.*)"', TEXT, re.MULTILINE)))
    chosen = set(words) - {"or", "and", "not"}
    assert len(chosen) > 10
    assert {word: any(name.startswith("test_") and word in name for name in names) for word in chosen} == dict.fromkeys(
        chosen, True
    )


def test_a_word_that_is_no_half_is_refused() -> None:
    done = subprocess.run(["bash", str(KIT), "third"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "usage: gpu_kit.sh bring | first | second\n")


def test_the_probe_times_each_stored_format_by_each_way() -> None:
    names = [name for name, _ in probe.products()]
    for format in probe.STORED:
        assert [name.partition(",")[0] for name in names if name.startswith(format)] == [
            *(f"{format} by {way}" for way in probe.product_kernels(probe.STORED[format](format))),
            format,
        ]


@pytest.mark.parametrize("name", probe.STORED)
def test_the_probe_s_rows_are_numbers_of_their_format(name: str) -> None:
    numbers = probe.dequantize_rows(probe.STORED[name](name), probe.torch.float32)
    assert numbers.shape == (probe.HEIGHT, probe.WIDTH)
    assert numbers.isfinite().all()
    assert len(numbers.unique(dim=0)) == probe.HEIGHT
