"""docs/reference/combinations.md lists the pairs of features that the code refuses.

`python -m tests.jobs.test_combination_table` prints the page with its tables made anew.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from jobs.config.settings import EncodeConfig, GenerateConfig, ScoreConfig, load
from jobs.evaluating.config import EvaluateConfig
from jobs.run.tasks.encode import encoding_task
from runtime import Runtime
from runtime.config.settings import DevicesConfig, Parallelism
from runtime.errors import WeightstreamError
from runtime.model.loading import LoadedModel
from runtime.plan.planner import plan_run
from runtime.ranks.ranks import Message, Ranks
from runtime.requests.prompts import Rejected
from runtime.synthesize.tokenizer import byte_level_tokenizer
from tests.support import synthesize

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "combinations.md"
BEGIN = "<!-- made by python -m tests.jobs.test_combination_table -->\n"
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
ROWS = ("dataset.kind=jsonl", "dataset.path=rows.jsonl")
PROMPT = [5, 6, 7]
NUM_CHARACTERS = 110  # of a message
MAX_WORDS = 1400  # of the page


@dataclass(frozen=True)
class Feature:
    """`words`: settings of the feature. `beside`: further settings for pairs that need them. `job`: the command, for a
    feature that is one. `family`: model type of a tiny model, for a feature of models."""

    name: str
    words: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    job: type[GenerateConfig] | None = None
    family: str | None = None


FEATURES = (
    Feature("`policy.admission=continuous`", ("policy.admission=continuous",)),
    Feature("`sampling.temperature` above 0", ("sampling.temperature=1",)),
    Feature("`sampling.n` above 1", ("sampling.n=2",), ("sampling.temperature=1",)),
    Feature("beams: `sampling.num_beams`", ("sampling.num_beams=2",)),
    Feature("structured output: `sampling.regex`", ("sampling.regex=a",)),
    Feature("`sampling.reasoning`", ('sampling.reasoning=["<a>","</a>"]',)),
    Feature("`kv.dtype=int8`", ("kv.dtype=int8",)),
    Feature("`kv=nvme`", ("kv.tier=nvme",)),
    Feature("`model.quantize=int8`", ("model.quantize=int8",)),
    Feature("`offload=nvme` without resident layers", ("offload.tier=nvme", "offload.resident_layers=0")),
    Feature("several turns: `dataset.turns_field`", (*ROWS, "dataset.turns_field=turns", "dataset.chat_template=true")),
    Feature("`dataset.window_rows`", (*ROWS, "dataset.window_rows=5")),
    Feature("`trace=true`", ("trace=true",)),
    Feature("`workers=elastic`", ("workers=elastic",)),
    Feature("`devices=sharded`", ("devices.way=sharded",)),
    Feature("`devices=tensor`", ("devices.way=tensor",)),
    Feature("`devices=pipeline`", ("devices.way=pipeline",)),
    Feature("`weightstream score`", job=ScoreConfig),
    Feature("`weightstream encode`", job=EncodeConfig),
    Feature("`weightstream evaluate`", ("tasks=[x]",), job=EvaluateConfig),
    Feature("padded lanes (BLOOM)", family="bloom"),
    Feature("MLA (DeepSeek-V2)", family="deepseek-v2"),
    Feature("encoder-decoder (T5)", family="t5"),
)


class _Alone(Ranks):
    """The first of two ranks while a run is opened: the other says what it says."""

    def __init__(self, way: Parallelism):
        self.rank, self.size, self.devices = 0, 2, DevicesConfig(way=way)
        self.machines = ["here", "here"]
        self.group = None  # pyright: ignore[reportAttributeAccessIssue]

    def exchange(self, message: Message) -> list[Message]:
        return [message] * 2

    def new_group(self) -> dist.ProcessGroup:
        return dist.ProcessGroup(0, 2)


class _Opened(Runtime):
    """Models that several pairs ask alike are loaded once; a pipeline changes its own."""

    def _loaded(self) -> LoadedModel:
        way = Parallelism.one if self.ranks is None else self.ranks.devices.way
        key = self.config.model, self.config.kv.dtype, self._encodes, way
        if key not in _LOADED:
            loaded = super()._loaded()
            if way is Parallelism.pipeline:
                return loaded
            _LOADED[key] = loaded
        return _LOADED[key]


_LOADED: dict[object, LoadedModel] = {}


@cache
def _models() -> Path:
    return Path(tempfile.mkdtemp(prefix="combinations-"))


@cache
def _model(family: str) -> Path:
    path = synthesize(family, _models() / family)
    tokenizer = byte_level_tokenizer(640)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


def refusal(first: Feature, second: Feature) -> str | None:
    """The message that refuses the pair; None if it is accepted. Runs the checks of settings, model and plan that a job
    runs before it writes anything."""
    ways = {(), first.beside, second.beside, (*first.beside, *second.beside)}
    said = [_refusal(first, second, beside) for beside in sorted(ways, key=len, reverse=True)]
    return None if None in said else said[0]


def _refusal(first: Feature, second: Feature, beside: Sequence[str]) -> str | None:
    job = first.job or second.job or GenerateConfig
    family = first.family or second.family or "llama"
    model = ["machine.device=cpu", f"model.name={family}", f"model.path={_model(family)}"]
    words = [*first.words, *second.words, *beside, *model]
    try:
        config = load(job, OmegaConf.from_dotlist(words))
        way = config.devices.way
        ranks = None if way is Parallelism.one else _Alone(way)
        with patch("runtime.library.api.compiled_kernels"):  # which takes longer than all else, and refuses nothing
            runtime = _Opened(config.runtime, ranks=ranks, encodes=isinstance(config, EncodeConfig))
        if isinstance(config, EncodeConfig):
            encoding_task(config)[0].check(runtime)
        elif job is GenerateConfig and way is Parallelism.one:
            made = runtime.request("0", PROMPT)
            assert not isinstance(made, Rejected), made
            sizes = [each.size for each in runtime.samples(made) if not isinstance(each, Rejected)]
            plan_run(runtime.model.shape, runtime.config, runtime.budgets(), sizes)
    except WeightstreamError as error:
        return str(error).replace(str(_model(family)), "DIR")
    return None


def _pairs() -> Iterator[tuple[int, int]]:
    """Places of pairs that can be asked for: one command, one model and one way of devices at a time."""
    for j, i in combinations(range(len(FEATURES)), 2):
        first, second = FEATURES[i], FEATURES[j]
        kinds = [(each.job is not None, each.family is not None, "devices" in each.name) for each in (first, second)]
        if not any(map(all, zip(*kinds, strict=True))):
            yield i, j


def page() -> str:
    """The page behind its introduction: each feature with its refused partners, then the message for each pair."""
    refused = {(i, j): why for i, j in _pairs() if (why := refusal(FEATURES[i], FEATURES[j])) is not None}
    lines = ["", "## By feature", "", "| feature | refused with |", "|---|---|"]
    for place, feature in enumerate(FEATURES):
        partners = sorted({each for pair in refused if place in pair for each in pair} - {place})
        lines.append(f"| {feature.name} | {', '.join(_brief(FEATURES[each]) for each in partners) or 'nothing'} |")
    lines += ["", "## Messages", "", "| pair | message |", "|---|---|"]
    for (i, j), why in refused.items():
        lines.append(f"| {_brief(FEATURES[j])} with {_brief(FEATURES[i])} | {_short(why)} |")
    return "\n".join(lines) + "\n"


def _brief(feature: Feature) -> str:
    """The setting alone, or the name where it has none."""
    return feature.name.rpartition(": ")[2]


def _short(why: str) -> str:
    line = " ".join(why.split()).replace("|", "\\|")
    return line if len(line) <= NUM_CHARACTERS else f"{line[:NUM_CHARACTERS].rpartition(' ')[0]} ..."


@pytest.mark.slow("runtime/test_combinations.py::test_all_of_them_are_counted")
def test_the_table_of_combinations_is_what_the_code_says() -> None:
    pytest.importorskip("llguidance")
    text = PAGE.read_text()
    made = page()
    assert text.partition(BEGIN)[2] == made, f"write this behind {BEGIN.strip()!r} in {PAGE}:\n{made}"
    assert len(text.split()) < MAX_WORDS


if __name__ == "__main__":
    sys.stdout.write(PAGE.read_text().partition(BEGIN)[0] + BEGIN + page() if PAGE.exists() else page())
