"""Whether one model type runs as transformers runs it: a tiny checkpoint, `generate`, and a streamed run."""

import shutil
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from runtime import OffloadConfig, PolicyConfig, Runtime, SamplingConfig
from runtime.config.settings import MachineConfig, ModelConfig, PolicyKind, RuntimeConfig, Tier
from runtime.errors import ConfigError, WeightstreamError
from runtime.probing.layer_lists import decoder_config
from runtime.probing.meta import auto_class
from runtime.sequences.sequence import Completion
from tests.tiny_checkpoints import MOST_PARAMETERS, NUM_NEW_TOKENS, TEMPERS, Answers, Silent, answers, save_tiny
from tests.tiny_configs import tiny_config

SCORE_TOLERANCE = 1e-4  # of a token's log-probability, as docs/how-to/scores.md promises
ROUNDINGS = 8  # times what the class's own float32 is off its float64, where that is more


class Outcome(Enum):
    exact = "exact"
    refused = "refused"
    no_config = "no tiny config"
    no_answer = "no answer"
    wrong = "WRONG"
    crash = "CRASH"

    @property
    def is_failure(self) -> bool:
        return self in (Outcome.wrong, Outcome.crash)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`name` as in `model_types.rows`; `lanes` where it ran; `note`: the refusal, the reason, or what differs."""

    name: str
    outcome: Outcome
    lanes: str = ""
    note: str = ""


class _NoConfig(Exception):
    """No tiny model that transformers itself can run."""


def judge(name: str, *, gather_tables: bool | None = None) -> Verdict:
    """Uses one thread and a temporary directory. Whatever is raised is in the answer."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home) / "model"
        try:
            answered = _reference(name, directory)
        except WeightstreamError as error:
            return Verdict(name=name, outcome=Outcome.refused, note=_one_line(error))
        except _NoConfig as error:
            why = Verdict(name=name, outcome=Outcome.no_config, note=_one_line(error))
            has_config = (directory / "config.json").exists()
            return _tried(name, directory, None, why, gather_tables) if has_config else why
        return _tried(name, directory, answered, Verdict(name=name, outcome=Outcome.exact), gather_tables)


def _tried(
    name: str, directory: Path, answered: Answers | None, otherwise: Verdict, gather_tables: bool | None
) -> Verdict:
    """Without answers to compare with, a model may still be refused; `otherwise` if it is not."""
    try:
        runtime = _opened(name, directory, gather_tables)
        return otherwise if answered is None else _compare(name, runtime, answered)
    except WeightstreamError as error:
        return Verdict(name=name, outcome=Outcome.refused, note=_one_line(error))
    except BaseException as error:
        note = f"{type(error).__name__} at {_place(error)}: {_one_line(error)}"
        return Verdict(name=name, outcome=Outcome.crash, note=note)


def _place(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(where.filename).name}:{where.lineno}"


def _reference(name: str, directory: Path) -> Answers:
    try:
        config = tiny_config(name)
        _require_tiny(config)
        for temper in TEMPERS:
            torch.manual_seed(0)
            if not temper.is_tied:
                untie(config)
            shutil.rmtree(directory, ignore_errors=True)
            save_tiny(auto_class(config).from_config(config, dtype=torch.float32), directory, temper)
            vocab_size = config.get_text_config(decoder=True).vocab_size
            with suppress(Silent):
                return answers(_loaded(directory), vocab_size)
        raise Silent("says too little")
    except WeightstreamError:
        raise
    except Exception as error:
        raise _NoConfig(f"{type(error).__name__} at {_place(error)}: {error}") from error


def _require_tiny(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters are left, {MOST_PARAMETERS:,} are the most")


def untie(config: PreTrainedConfig) -> None:
    for part in (config, decoder_config(config)):
        part.tie_word_embeddings = False


def _loaded(directory: Path) -> PreTrainedModel:
    config: PreTrainedConfig = AutoConfig.from_pretrained(directory)
    return auto_class(config).from_pretrained(directory, dtype=torch.float32).eval()


def _opened(name: str, directory: Path, gather_tables: bool | None) -> Runtime:
    """Nothing stays resident; prompts go in lanes of 3 rows, 2 lanes at a time, several blocks one after the other."""
    offload = OffloadConfig(
        tier=Tier.nvme,
        resident_layers=0,
        read_chunk_mib=1,
        cache_dir=str(directory.with_name("cache")),
        gather_tables=gather_tables,
    )
    config = RuntimeConfig(
        model=ModelConfig(name=name, path=str(directory)),
        offload=offload,
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=3, num_micro_batches=2),
        machine=MachineConfig(device="cpu", num_threads=1),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
    )
    return Runtime(config)


def _compare(name: str, runtime: Runtime, answered: Answers) -> Verdict:
    lanes = "packed" if runtime.model.shape.is_packed else "padded"
    wrong: list[str] = []
    for index, result in enumerate(runtime.generate(answered.prompts)):
        expected = answered.expected[index]
        actual = list(result.token_ids) if isinstance(result, Completion) else []
        if not isinstance(result, Completion) or result.error is not None:
            wrong.append(f"prompt {index}: {result!r:.160}")
        elif actual != expected:
            pairs = zip(actual, expected, strict=False)
            first = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), len(actual))
            wrong.append(f"{index} from token {first}")
    if wrong:
        note = f"{len(wrong)} of {len(answered.prompts)} prompts: {', '.join(wrong)}"
        return Verdict(name=name, outcome=Outcome.wrong, lanes=lanes, note=note)
    return _compare_scores(name, runtime, answered, lanes)


def _compare_scores(name: str, runtime: Runtime, answered: Answers, lanes: str) -> Verdict:
    if not answered.scored:
        return Verdict(name=name, outcome=Outcome.exact, lanes=lanes, note="tokens; its forward gives no scores")
    try:
        results = runtime.score([(each.prompt, each.target) for each in answered.scored])
    except ConfigError as error:
        note = f"tokens; scores refused: {_one_line(error)}"
        return Verdict(name=name, outcome=Outcome.exact, lanes=lanes, note=note)
    worst = 0.0
    for result, each in zip(results, answered.scored, strict=True):
        if result.error is not None:
            return Verdict(name=name, outcome=Outcome.wrong, lanes=lanes, note=f"score: {result.error}")
        pairs = zip(result.token_logprobs, each.logprobs, strict=True)
        worst = max(worst, *(abs(ours - theirs) for ours, theirs in pairs))
    rounding = max(each.rounding for each in answered.scored)
    outcome = Outcome.exact if worst <= max(SCORE_TOLERANCE, ROUNDINGS * rounding) else Outcome.wrong
    note = f"scores within {worst:.1e}" + (f", its own rounding {rounding:.1e}" if worst > SCORE_TOLERANCE else "")
    return Verdict(name=name, outcome=outcome, lanes=lanes, note=note)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
