"""The prediction head of a checkpoint guesses tokens: outputs stay the same, and guesses are those of transformers."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from jobs.packing.config import PackConfig, SourceConfig
from jobs.packing.packing import pack
from runtime import PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import (
    Admission,
    KVConfig,
    KVDType,
    ModelConfig,
    OffloadConfig,
    PolicyKind,
    SharePrefixes,
    Tier,
)
from runtime.engine.mtp_drafts import MtpDrafts
from runtime.engine.records import PassCounts, PassRecord
from runtime.errors import ConfigError
from runtime.sequences import drafts
from runtime.sequences.sequence import Completion, Request, SequenceState
from runtime.sequences.sequence import Sequence as Running
from runtime.stream.device import ComputeDevice
from runtime.synthesize.checkpoints import synthesize_checkpoint
from tests.fake_device import FakeDevice
from tests.support import FAMILIES as FAMILIES_OF_TESTS
from tests.support import Reference, transformers_model

FAMILIES = ("deepseek-v3", "glm-4-moe")
INDEX = "model.safetensors.index.json"
POLICY = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=2, draft_tokens=3, draft_model="mtp")
NVME = OffloadConfig(tier=Tier.nvme, resident_layers=0)


def random_projection(size: int) -> torch.Tensor:
    return torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(0)) * size**-0.5


def echo_projection(size: int) -> torch.Tensor:
    """Passes on embeddings, and no hidden states."""
    return torch.cat([torch.eye(size), torch.zeros(size, size)], 1)


def add_head(directory: Path, projection: Callable[[int], torch.Tensor]) -> None:
    """Adds a head to a checkpoint: a copy of its last layer behind a projection."""
    config = json.loads((directory / "config.json").read_text())
    number, size = config["num_hidden_layers"], config["hidden_size"]
    weights = {
        name: weight for file in sorted(directory.glob("*.safetensors")) for name, weight in load_file(file).items()
    }
    last, own = f"model.layers.{number - 1}.", f"model.layers.{number}."
    head = {own + name.removeprefix(last): weight.clone() for name, weight in weights.items() if name.startswith(last)}
    dtype = weights["model.embed_tokens.weight"].dtype
    head[f"{own}eh_proj.weight"] = projection(size).to(dtype)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        head[f"{own}{norm}.weight"] = torch.ones(size, dtype=dtype)
    head[f"{own}shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    head[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    head[f"{own}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(head, directory / "model-head.safetensors", {"format": "pt"})
    files = {name: file.name for file in directory.glob("*.safetensors") for name in load_file(file)}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.fixture(scope="module")
def with_head(
    reference: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Reference]:
    """The reference of a family, with a head in its checkpoint."""
    made = dict[str, Reference]()

    def make(family: str) -> Reference:
        if family not in made:
            plain, directory = reference(family), tmp_path_factory.mktemp("heads") / "model"
            shutil.copytree(plain.directory, directory)
            add_head(directory, random_projection)
            made[family] = replace(plain, directory=directory)
        return made[family]

    return make


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer whose head computes the same from all tokens but the first, as its projection passes on
    embeddings only, and these are normalized."""
    directory = tmp_path_factory.mktemp("heads") / "echo"
    overrides = {**FAMILIES_OF_TESTS["glm-4-moe"].overrides, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    synthesize_checkpoint(model="glm4_moe", overrides=overrides, directory=directory, seed=1, dtype=torch.bfloat16)
    (path,) = directory.glob("*.safetensors")
    weights = load_file(path)
    embeddings = weights["model.embed_tokens.weight"].float()
    embeddings /= embeddings.pow(2).mean(-1, keepdim=True).sqrt()
    weights["model.embed_tokens.weight"] = embeddings.bfloat16()
    save_file(weights, path.with_name("model-main.safetensors"), {"format": "pt"})
    path.unlink()  # it would be read without the index
    add_head(directory, echo_projection)
    return directory


@pytest.fixture(autouse=True)
def nothing_similar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the head guesses."""
    monkeypatch.setattr(drafts, "find_continuation", lambda text, suffix: (0, 0))


def run(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    device: ComputeDevice | None = None,
    kv: KVConfig | None = None,
    num_passes: int | None = None,
    unfinished: dict[int, SequenceState] | None = None,
    **policy: object,
) -> tuple[dict[int, tuple[int, ...]], list[PassRecord], dict[int, SequenceState]]:
    """The tokens of each prompt, the passes, and what is unfinished after `num_passes` passes."""
    config = RuntimeConfig(
        model=ModelConfig.from_name(str(directory)),
        policy=replace(POLICY, **policy),
        offload=NVME,
        sampling=replace(sampling, ignore_eos=True),
        kv=kv or KVConfig(),
    )
    passes, found, states = list[PassRecord](), dict[int, Completion](), dict[int, SequenceState]()
    with Runtime(config, device=device) as runtime:
        made = [each for i, ids in enumerate(prompts) for each in runtime.samples(runtime.request(str(i), ids))]
        requests = [each for each in made if isinstance(each, Request)]
        with runtime.open_with_backoff(requests) as (plan, session):
            order = [i for block in plan.blocks for i in block.members]

            class Stopped(Exception):
                pass

            def on_pass(record: PassRecord) -> None:
                passes.append(record)
                if len(passes) == num_passes:
                    raise Stopped

            try:
                if config.policy.admission is Admission.continuous:
                    found |= dict(session.stream(order, requests, unfinished or {}, on_pass))
                else:
                    for block in plan.blocks:
                        found |= dict(session.wave(block, block.members, requests, unfinished or {}, on_pass))
            except Stopped:
                states = session.snapshot()
            drafts = session._engine.lanes.context.drafts
            model = None if drafts is None else drafts._model
            if isinstance(model, MtpDrafts) and num_passes is None:
                pool = model._engine.lanes.pages.pool
                assert pool.num_free == pool.num_pages, "all pages are free again"
                assert not model._shadows
                assert not model._begins
                assert not model._last_hidden
    return {i: completion.token_ids for i, completion in found.items()}, passes, states


def counts(passes: Sequence[PassRecord]) -> PassCounts:
    return PassCounts.total([record.counts for record in passes])


def greedy(reference: Reference) -> SamplingConfig:
    return SamplingConfig(max_new_tokens=len(reference.expected[0]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("admission", Admission)
def test_tokens_are_those_of_generate(family: str, admission: Admission, with_head: Callable[[str], Reference]) -> None:
    made = with_head(family)
    found, passes, _ = run(made.directory, made.prompts, greedy(made), admission=admission)
    assert [list(found[i]) for i in range(len(made.prompts))] == made.expected
    assert counts(passes).drafted_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_those_of_transformers(
    family: str, with_head: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, guessed = with_head(family), list[tuple[list[int], int]]()
    guess = MtpDrafts.guess

    def record(self: MtpDrafts, wanted: Sequence[tuple[Running, int]]) -> list[list[int]]:
        found = guess(self, wanted)
        guessed.extend((sequence.known_ids, tokens[0]) for (sequence, _), tokens in zip(wanted, found, strict=True))
        return found

    monkeypatch.setattr(MtpDrafts, "guess", record)
    run(made.directory, made.prompts, greedy(made), share_prefixes=SharePrefixes.off, prefill_chunk_tokens=8)
    main = transformers_model(made.directory)
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{main.config.num_hidden_layers}\."]
    head = MtpModel.from_pretrained(main)
    assert len(guessed) > 20
    assert len({token for _, token in guessed}) > 5, "a head that says little proves little"
    for known, token in guessed:
        ids = torch.tensor([known])
        with torch.inference_mode():
            hidden = main(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
            positions = torch.arange(1, ids.shape[1])[None]
            cache = MtpCache(config=main.config.get_mtp_config())
            drafted, _, _ = head(ids[:, 1:], hidden, None, positions, cache)
        assert token == drafted.item()


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=24),
        SamplingConfig(max_new_tokens=16, temperature=0.8, top_k=40, n=2, repetition_penalty=1.1, logprobs=2),
    ],
)
def test_right_guesses_save_passes(admission: Admission, sampling: SamplingConfig, echo: Path) -> None:
    prompts = [[(7 * i + j * j) % 200 + 5 for j in range(20 + i)] for i in range(5)]
    expected, plain, _ = run(echo, prompts, sampling, admission=admission, draft_tokens=0)
    found, passes, _ = run(echo, prompts, sampling, admission=admission, share_prefixes=SharePrefixes.off)
    assert found == expected
    total = counts(passes)
    assert total.accepted_tokens > 0.5 * total.drafted_tokens
    assert len(passes) < 0.7 * len(plain)


@pytest.mark.parametrize("kv", [KVConfig(), KVConfig(dtype=KVDType.int8)])
def test_it_guesses_in_front_of_an_accelerator_and_with_quantized_keys(kv: KVConfig, echo: Path) -> None:
    prompts, sampling = [[5, 6, 7, 8, 9], [9, 8, 7]], SamplingConfig(max_new_tokens=20)
    expected, _, _ = run(echo, prompts, sampling, draft_tokens=0, kv=kv)
    found, passes, _ = run(echo, prompts, sampling, device=FakeDevice((False, True)), kv=kv)
    assert found == expected
    assert counts(passes).accepted_tokens


@pytest.mark.parametrize("admission", Admission)
def test_stopped_runs_go_on_with_guesses(admission: Admission, echo: Path) -> None:
    prompts = [[(3 * i + j) % 200 + 5 for j in range(12)] for i in range(3)]
    sampling = SamplingConfig(max_new_tokens=24)
    expected, _, _ = run(echo, prompts, sampling, admission=admission, draft_tokens=0)
    done, _, states = run(echo, prompts, sampling, admission=admission, num_passes=4)
    assert states
    rest, passes, _ = run(echo, prompts, sampling, admission=admission, unfinished=states)
    assert {**rest, **done} == expected
    assert counts(passes).accepted_tokens


def test_a_packed_checkpoint_keeps_its_head(echo: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack(PackConfig(model=SourceConfig(path=str(echo)), out=str(packed), verify=False), lambda done, total: None)
    prompts, sampling = [[5, 6, 7, 8, 9], [9, 8, 7]], SamplingConfig(max_new_tokens=20)
    found, passes, _ = run(packed, prompts, sampling)
    assert found == run(echo, prompts, sampling, draft_tokens=0)[0]
    assert counts(passes).accepted_tokens


def test_a_broken_head_guesses_nothing(echo: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(echo, broken)
    weights = load_file(broken / "model-head.safetensors")
    weights["model.layers.1.eh_proj.weight"][0, 0] = torch.nan
    save_file(weights, broken / "model-head.safetensors", {"format": "pt"})
    prompts, sampling = [[5, 6, 7, 8, 9], [9, 8, 7]], SamplingConfig(max_new_tokens=20)
    found, passes, _ = run(broken, prompts, sampling)
    assert found == run(echo, prompts, sampling, draft_tokens=0)[0]
    assert not counts(passes).drafted_tokens


def test_the_ledger_counts_it(echo: Path) -> None:
    def entries(policy: PolicyConfig) -> dict[str, int]:
        runtime = Runtime(RuntimeConfig(model=ModelConfig.from_name(str(echo)), policy=policy, offload=NVME))
        made = [runtime.request(str(i), [5, 6, 7]) for i in range(3)]
        (ledger,) = runtime.plan([each for each in made if isinstance(each, Request)]).placement.ledgers
        return {entry.name: entry.num_bytes for entry in ledger.entries}

    plain, with_model = entries(replace(POLICY, draft_model=None)), entries(POLICY)
    assert {*with_model} - {*plain} == {"draft model"}
    head = load_file(echo / "model-head.safetensors")
    assert with_model["draft model"] > sum(weight.nbytes for weight in head.values()) + plain["KV cache"] / 2


def test_a_checkpoint_without_a_head_is_refused_by_name(reference: Callable[[str], Reference]) -> None:
    for family, why in (("llama", "no prediction head"), ("deepseek-v3", r"\.eh_proj\.weight")):
        model = ModelConfig.from_name(str(reference(family).directory))
        with pytest.raises(ConfigError, match=f"policy.draft_model=mtp: .*{why}"):
            Runtime(RuntimeConfig(model=model, policy=POLICY))
