"""A small model guesses tokens: outputs stay those of the large model, and it takes fewer passes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime import PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import Admission, DType, OffloadConfig, PolicyKind, Tier
from runtime.engine.draft_model import DraftModel
from runtime.engine.records import PassCounts, PassRecord
from runtime.errors import ConfigError
from runtime.sequences import drafts
from runtime.sequences.sequence import Completion, Request
from runtime.stream.device import ComputeDevice
from tests.fake_device import FakeDevice
from tests.support import Reference

TINY = Path("runtime/data/tiny").absolute()
PROMPTS = ["Sort these numbers: 3 1 2", "Reverse: 1 2 3 4", "Hello", "Add 3 and 4", "What is the capital of France?"]
POLICY = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2, draft_tokens=3)
NVME = OffloadConfig(tier=Tier.nvme, resident_layers=0)


@pytest.fixture(scope="module")
def similar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is often wrong, with a vocabulary that is padded to a larger size."""
    directory = tmp_path_factory.mktemp("models") / "similar"
    shutil.copytree(TINY, directory)
    weights, noise = load_file(TINY / "model.safetensors"), torch.Generator().manual_seed(0)
    config = json.loads((TINY / "config.json").read_text())
    for name, weight in weights.items():
        if "mlp" in name:
            weight += 0.15 * weight.std() * torch.randn(weight.shape, generator=noise)
        if weight.shape[0] == config["vocab_size"]:
            weights[name] = torch.cat([weight, weight.new_full((64, weight.shape[1]), -1.0)])
    config["vocab_size"] += 64
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(autouse=True)
def nothing_similar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the model guesses."""
    monkeypatch.setattr(drafts, "find_continuation", lambda text, suffix: (0, 0))


def run(
    draft_model: Path | None,
    sampling: SamplingConfig | None = None,
    *,
    model: str = "tiny",
    device: ComputeDevice | None = None,
    **policy: object,
) -> tuple[list[tuple[int, ...]], list[PassRecord]]:
    """The tokens of each prompt, and the passes."""
    chosen = replace(POLICY, draft_model=None if draft_model is None else str(draft_model), **policy)
    sampling = replace(sampling or SamplingConfig(max_new_tokens=20), ignore_eos=True)
    config = RuntimeConfig(model=model, policy=chosen, offload=NVME, sampling=sampling)
    with Runtime(config, device=device) as runtime:
        made = [each for i, text in enumerate(PROMPTS) for each in runtime.samples(runtime.request(str(i), text))]
        requests, found = [each for each in made if isinstance(each, Request)], dict[int, Completion]()
        passes = list[PassRecord]()
        with runtime.open_with_backoff(requests) as (_, session):
            found |= dict(session.generate(requests, passes.append))
            guesser = session._engine.lanes.context.drafts._model if chosen.draft_tokens else None
            if isinstance(guesser, DraftModel):
                pool = guesser._engine.lanes.pages.pool
                assert pool.num_free == pool.num_pages, "all pages are free again"
                assert not guesser._shadows
    assert len(found) == len(made) == len(requests)
    return [found[i].token_ids for i in range(len(requests))], passes


def counts(passes: list[PassRecord]) -> PassCounts:
    return PassCounts.total([record.counts for record in passes])


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=20),
        SamplingConfig(max_new_tokens=12, temperature=0.9, top_k=40, n=2, repetition_penalty=1.1, logprobs=2),
    ],
)
def test_tokens_are_the_same_with_right_and_wrong_guesses(
    admission: Admission, sampling: SamplingConfig, similar: Path
) -> None:
    expected, plain = run(None, sampling, admission=admission, draft_tokens=0)
    for draft_model in (TINY, similar):
        found, passes = run(draft_model, sampling, admission=admission)
        assert found == expected
        total = counts(passes)
        assert total.accepted_tokens
        assert len(passes) < len(plain)
        if draft_model is TINY:
            assert total.accepted_tokens == total.drafted_tokens, "both draw the same tokens from the same noise"
        else:
            assert total.accepted_tokens < total.drafted_tokens


def test_a_model_that_caches_latents_guesses(reference: Callable[[str], Reference]) -> None:
    directory = reference("deepseek-v3").directory
    expected, _ = run(None, model=str(directory), draft_tokens=0)
    found, passes = run(directory, model=str(directory))
    assert found == expected
    assert (total := counts(passes)).accepted_tokens == total.drafted_tokens > 0


def test_it_guesses_in_front_of_an_accelerator(similar: Path) -> None:
    expected, _ = run(None, draft_tokens=0)
    found, passes = run(similar, device=FakeDevice((False, True)))
    assert found == expected
    assert counts(passes).accepted_tokens


def test_what_exceeds_its_context_is_not_guessed(similar: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(similar, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    expected, _ = run(None, draft_tokens=0)
    (found, some), (_, more) = run(short), run(similar)
    assert found == expected
    assert counts(some).drafted_tokens < counts(more).drafted_tokens


def test_the_ledger_counts_its_weights_and_pages() -> None:
    def entries(draft_model: str | None) -> dict[str, int]:
        policy = replace(POLICY, draft_model=draft_model)
        runtime = Runtime(RuntimeConfig(model="tiny", policy=policy, offload=NVME))
        (ledger,) = runtime.plan([runtime.request(str(i), text) for i, text in enumerate(PROMPTS)]).placement.ledgers
        return {entry.name: entry.num_bytes for entry in ledger.entries}

    plain, with_model = entries(None), entries(str(TINY))
    assert {*with_model} - {*plain} == {"draft model"}
    weights = (TINY / "model.safetensors").stat().st_size
    assert with_model["draft model"] > weights + plain["KV cache"]


def test_models_that_cannot_guess_are_refused_by_name(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        policy = replace(POLICY, draft_model=str(path))
        with pytest.raises(ConfigError) as error:
            Runtime(RuntimeConfig(model="tiny", policy=policy))
        return str(error.value)

    assert refused(tmp_path / "none").startswith(f"policy.draft_model={tmp_path / 'none'}: ")
    recurrent = tmp_path / "recurrent"
    shutil.copytree(reference("mamba-2").directory, recurrent)
    assert "needs padded lanes" in refused(recurrent)
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first, second, *_ = (token for token in tokenizer["model"]["vocab"] if len(token) == 1)
    vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "2 of the model's" in refused(other)


def test_where_nothing_can_be_guessed_it_is_not_loaded(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    policy = replace(POLICY, draft_model=str(tmp_path / "none"), draft_tokens=None)
    model = replace(RuntimeConfig(model="tiny").model, dtype=DType.bfloat16)
    Runtime(RuntimeConfig(model=model, policy=policy))
    assert "policy.draft_model is not used: more tokens in a pass can change 16-bit results" in caplog.text
