"""Encoder-decoders: the encoder is read and run once per block, and what it leaves behind is in the ledger."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime import ModelConfig, Runtime, SamplingConfig
from runtime.config.settings import DType, Prefetch, PrefetchConfig
from runtime.engine.records import PassRecord, Phase
from runtime.errors import CheckpointError
from runtime.model.loading import LoadedModel, load_model
from runtime.plan.placement.load import Load
from runtime.plan.placement.memory import PAGE_TOKENS, lane_entries
from runtime.plan.shape.extents import slot_layout
from runtime.plan.shape.shapes import StageKind
from runtime.sequences.sequence import Request
from runtime.store.checkpoint import open_checkpoint
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import NUM_NEW_TOKENS, Reference, transformers_model
from tests.toy import sizes_of, toy_shape

References = Callable[[str], Reference]
FAMILIES = ("t5", "flan-t5", "umt5")
NUM_ENCODER, NUM_DECODER = 4, 3


def load(directory: Path) -> LoadedModel:
    config = ModelConfig(name="test", path=str(directory), dtype=DType.float32)
    return load_model(config, torch.device("cpu"), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_follow_the_forward_pass(family: str, reference: References) -> None:
    stages = load(reference(family).directory).shape.stages
    layers = [f"encoder {i}" for i in range(NUM_ENCODER)], [f"layer {i}" for i in range(NUM_DECODER)]
    assert [stage.name for stage in stages] == ["embedding", *layers[0], "bridge", *layers[1], "head"]
    outer = {stage.name: {p.name for p in stage.parameters} for stage in stages if not stage.kind.is_layer}
    assert outer == {
        "embedding": {"shared.weight", "encoder.embed_tokens.weight"},
        "bridge": {"encoder.final_layer_norm.weight", "decoder.embed_tokens.weight"},
        "head": {"decoder.final_layer_norm.weight", "lm_head.weight"},
    }


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("resident_layers", [0, 2, 5])
@pytest.mark.parametrize("kind", Prefetch)
def test_prefetch_and_resident_layers_do_not_change_tokens(
    kind: Prefetch, resident_layers: int, reference: References
) -> None:
    ref = reference("t5")
    prefetch = PrefetchConfig(kind=kind, depth=2, block_layers=2)
    config = config_for(ref, prefetch=prefetch, resident_layers=resident_layers)
    assert tokens(config, ref.prompts) == ref.expected


def test_decode_passes_leave_the_encoder_on_disk(reference: References) -> None:
    ref = reference("t5")
    runtime = Runtime(config_for(ref))
    made = [runtime.request(str(index), prompt) for index, prompt in enumerate(ref.prompts)]
    requests = [request for request in made if isinstance(request, Request)]
    records: list[PassRecord] = []
    with runtime.open_with_backoff(requests) as (plan, session):
        for block in plan.blocks:
            session.run(block, requests, records.append)
    passes = [record.phase for record in records]
    assert passes == [Phase.prefill, *[Phase.decode] * (NUM_NEW_TOKENS - 1)]
    assert records[0].counts.real_tokens == sum(map(len, ref.prompts))
    layouts = {stage.kind: slot_layout(stage).num_bytes for stage in runtime.model.shape.stages}
    decoder = NUM_DECODER * layouts[StageKind.layer]
    read = [record.times.bytes_read_disk for record in records]
    assert read[2:] == [pytest.approx(decoder, rel=0.1)] * (len(read) - 2)
    assert read[0] > decoder + 2 * layouts[StageKind.encoder]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_has_the_bytes_that_transformers_caches(family: str, reference: References) -> None:
    ref = reference(family)
    shape = load(ref.directory).shape
    out = transformers_model(ref.directory)(
        input_ids=torch.ones(1, 5, dtype=torch.long), decoder_input_ids=torch.ones(1, 3, dtype=torch.long)
    )
    own, cross = out.past_key_values.self_attention_cache, out.past_key_values.cross_attention_cache
    own_bytes, cross_bytes = (sum(x.keys.nbytes + x.values.nbytes for x in cache.layers) for cache in (own, cross))
    assert (own_bytes, cross_bytes) == (3 * shape.kv_bytes_per_token, 5 * shape.cross_kv_bytes_per_token)


def test_the_ledger_counts_prompts_once_and_answers_once() -> None:
    """Two lanes, of 2 rows 30 wide and of 1 row 25 wide; answers of up to 16 tokens."""
    shape = toy_shape(4, num_encoder_layers=3, is_packed=False)
    lanes = [sizes_of([30, 20]), sizes_of([25])]
    assert Load.from_lanes(shape, lanes, 8).num_kv_pages * PAGE_TOKENS == 3 * 16
    entries = {e.name: e.num_bytes for e in lane_entries(shape, lanes, 8)}
    assert entries["encoder output"] == (2 * 30 + 25) * (shape.cross_kv_bytes_per_token + shape.hidden_size * 4)
    assert entries["position bias"] == (4 * 4 + 2) * 30**2 + (4 * 4 + 1) * 25**2
    chunked = {e.name: e.num_bytes for e in lane_entries(shape, lanes, 512)}
    assert entries == chunked, "an encoder reads whole prompts"


@pytest.mark.parametrize(("family", "has_head"), [("t5", False), ("flan-t5", True), ("umt5", True)])
def test_a_head_of_its_own_is_stored_and_used(family: str, has_head: bool, reference: References) -> None:
    directory = reference(family).directory
    model = transformers_model(directory)
    assert ("lm_head.weight" in open_checkpoint(directory).tensors) is has_head
    assert torch.equal(model.lm_head.weight, model.shared.weight) is not has_head
    assert model.config.tie_word_embeddings, "transformers' config claims it whatever is stored"


def test_a_repetition_penalty_is_for_what_was_generated(reference: References) -> None:
    ref = reference("t5")
    model = transformers_model(ref.directory)
    sampling = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True, repetition_penalty=1.7)
    expected = [
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW_TOKENS,
            repetition_penalty=1.7,
            do_sample=False,
            eos_token_id=None,
        )[0, 1:].tolist()
        for prompt in ref.prompts
    ]
    assert expected != ref.expected
    assert tokens(config_for(ref, sampling=sampling), ref.prompts) == expected


def test_a_checkpoint_that_does_not_say_how_answers_begin_is_refused(reference: References, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(reference("t5").directory, tmp_path / "model"))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((directory / name).read_text())
        kept = {key: value for key, value in values.items() if key not in ("decoder_start_token_id", "bos_token_id")}
        (directory / name).write_text(json.dumps(kept))
    with pytest.raises(CheckpointError, match="decoder_start_token_id"):
        load(directory)
