"""Passes that are recorded and replayed give the tokens of those that are launched, and what cannot be is launched or
refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime import KVConfig, PolicyConfig, Runtime, RuntimeConfig
from runtime.attention import fixed
from runtime.attention.layout import PassLayout
from runtime.attention.views import DecodeRows, Reach
from runtime.config.settings import Admission, KVDType, KVTier, PolicyKind, Tier
from runtime.errors import ConfigError, Interrupted
from runtime.model import expert_groups
from runtime.stream.device import ComputeDevice
from tests.attention_doubles import install_flash
from tests.device_operators import operators_of_a_device
from tests.fake_device import FakeDevice
from tests.host_counters import CountedDevice, counting
from tests.host_counts import HostCounts
from tests.runtime.sampling_support import complete, request_of
from tests.runtime.test_dequantized_weights import written
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import Reference, in_float32

References = Callable[[str], Reference]


def config_of(ref: Reference, *, lanes: int = 1, tier: Tier = Tier.none, kv: KVTier = KVTier.device) -> RuntimeConfig:
    policy = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=8, num_micro_batches=lanes, draft_tokens=0)
    config = config_for(ref, tier=tier, resident_layers=None, policy=policy)
    return replace(config, kv=KVConfig(tier=kv), model=replace(config.model, graphs=True))


class Recorder(FakeDevice):
    """Counts recordings and replays."""

    def __init__(self) -> None:
        super().__init__((False, False))
        self.num_recorded = self.num_replayed = 0

    def record_graph(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        made, replay = super().record_graph(work)
        self.num_recorded += 1

        def counted() -> None:
            self.num_replayed += 1
            replay()

        return made, counted


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("way", ["flash", "fused"])
@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "gpt-oss"])
def test_replayed_passes_give_the_tokens_of_transformers(
    family: str, way: str, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One recording serves several passes, whose rows are longer each time."""
    monkeypatch.setattr(expert_groups, "multiplies_all_experts", lambda *sizes: True)
    if way == "flash":
        install_flash(monkeypatch, (torch.float32,)).has_room = True
    ref, device = in_float32(reference(family), tmp_path), Recorder()
    with operators_of_a_device():
        assert tokens(config_of(ref), ref.prompts, device) == ref.expected
    assert device.num_recorded >= 1
    assert device.num_replayed > device.num_recorded


def test_a_pass_that_asks_the_device_is_launched_and_the_log_says_why(
    reference: References, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_groups, "multiplies_all_experts", lambda *sizes: False)
    ref, device = reference("mixtral"), Recorder()
    with operators_of_a_device():
        assert tokens(config_of(ref), ref.prompts, device) == ref.expected
    assert device.num_replayed == 0
    assert "cannot be recorded: operation not permitted when stream is capturing: tolist" in caplog.text


def test_rows_that_end_share_recordings_with_those_that_go_on(
    reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every eight rows, and of many lengths."""
    monkeypatch.setattr(fixed, "MIN_POSITIONS", 512)
    install_flash(monkeypatch, (torch.float32,)).has_room = True
    ref, device = reference("llama"), Recorder()
    with operators_of_a_device():
        runtime = Runtime(config_of(ref), device=device)
        requests = [request_of(runtime, str(i), p, max_new_tokens=2 + i % 5) for i, p in enumerate(ref.prompts)]
        completions = complete(runtime, requests)
    assert [list(c.token_ids) for c in completions] == [ref.expected[i][: 2 + i % 5] for i in range(len(requests))]
    assert device.num_recorded == 1
    assert device.num_replayed >= 2


@pytest.mark.parametrize("graphs", [False, True])
def test_prompts_that_enter_between_replayed_passes_are_computed(
    graphs: bool, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With continuous admission passes that are launched, with a prompt, come behind passes that were replayed."""
    monkeypatch.setattr(fixed, "MIN_POSITIONS", 512)
    install_flash(monkeypatch, (torch.float32,)).has_room = True
    ref, device = reference("llama"), Recorder()
    policy = PolicyConfig(
        kind=PolicyKind.fixed, micro_batch_size=3, num_micro_batches=1, admission=Admission.continuous
    )
    config = config_for(ref, tier=Tier.none, resident_layers=None, policy=policy)
    config = replace(config, kv=KVConfig(tier=KVTier.device), model=replace(config.model, graphs=graphs))
    short = [place for place, prompt in enumerate(ref.prompts) if len(prompt) < 12]
    lengths = [2, 7, 3, 7, 5, 7, 4] * 2
    places = [short[turn % len(short)] for turn in range(len(lengths))]
    found = dict[str, list[int]]()
    with operators_of_a_device():
        runtime = Runtime(config, device=device)
        requests = [
            request_of(runtime, str(turn), ref.prompts[place], max_new_tokens=lengths[turn])
            for turn, place in enumerate(places)
        ]
        with runtime.open_with_backoff(requests) as (_, session):
            for _, completion in session.stream(range(len(requests)), requests, {}):
                found[completion.request.key] = list(completion.token_ids)
    assert (device.num_replayed > 0) is graphs
    expected = [ref.expected[place][:length] for place, length in zip(places, lengths, strict=True)]
    assert [found[request.key] for request in requests] == expected


def test_passes_that_cannot_be_recorded_are_launched_as_they_were(
    reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Recorder):
        def record_graph(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fixed, "MIN_POSITIONS", 512)
    install_flash(monkeypatch, (torch.float32,)).has_room = True
    ref = reference("llama")
    with operators_of_a_device():
        assert tokens(config_of(ref), ref.prompts, Full()) == ref.expected


REFUSED = {
    "is not a CUDA device": {"device": ComputeDevice("cpu")},
    "set offload=none and kv=device": {"tier": Tier.cpu},
    "set policy.num_micro_batches=1": {"lanes": 2},
    "runs in padded lanes": {"family": "qwen3-next"},
    "caches latents": {"family": "deepseek-v3"},
    "set kv.dtype=auto": {"kv_dtype": KVDType.int8},
}


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_the_key_to_change(reason: str, reference: References) -> None:
    asked = dict(REFUSED[reason])
    device, family = asked.pop("device", None) or Recorder(), asked.pop("family", "llama")
    kv_dtype, ref = asked.pop("kv_dtype", KVDType.auto), reference(family)
    config = config_of(ref, **asked)
    config = replace(config, kv=replace(config.kv, dtype=kv_dtype))
    if "tier" in asked:
        config = replace(config, offload=replace(config.offload, resident_layers=1))
    with pytest.raises(ConfigError, match=f"model.graphs=true: .*{reason}.*; or set model.graphs=false"):
        tokens(config, ref.prompts, device)


class CountedRecorder(CountedDevice):
    """Keeps what was counted while it recorded."""

    def __init__(self) -> None:
        super().__init__((False, False))
        self.found: list[HostCounts] = []

    def record_graph(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        assert self.counter is not None, "nobody counts"
        self.counter.take()
        recording = super().record_graph(work)
        self.found.append(self.counter.take())
        return recording


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss", "qwen3-moe", "gemma-3"])
def test_nothing_of_one_pass_is_in_a_recording(
    family: str, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is uploaded while it is made would be the same for ever."""
    monkeypatch.setattr(expert_groups, "multiplies_all_experts", lambda *sizes: True)
    ref = in_float32(reference(family), tmp_path)
    with operators_of_a_device(), counting():
        device = CountedRecorder()
        assert tokens(config_of(ref), ref.prompts, device) == ref.expected
    assert device.found
    for counts in device.found:
        assert counts.copies == []
        assert counts.syncs == {}


@pytest.mark.slow("runtime/test_recorded.py::test_nothing_of_one_pass_is_in_a_recording")
@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("name", ["bitsandbytes nf4", "lossless"])
def test_recordings_of_dequantized_experts_bring_nothing_either(
    name: str, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_groups, "multiplies_all_experts", lambda *sizes: True)
    ref = reference("mixtral")
    stored, _ = written(ref, "mixtral", name, tmp_path)
    config = config_of(replace(ref, directory=stored))
    with operators_of_a_device(), counting():
        device = CountedRecorder()
        tokens(config, ref.prompts, device)
    assert device.found
    for counts in device.found:
        assert counts.copies == []
        assert counts.syncs == {}


def test_a_run_stops_between_passes_that_are_replayed(reference: References, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "MIN_POSITIONS", 512)
    ref, device = reference("llama"), Recorder()
    with operators_of_a_device(), pytest.raises(Interrupted):
        Runtime(config_of(ref), device=device, should_stop=lambda: device.num_replayed == 2).generate(ref.prompts)
    assert device.num_replayed == 2


def test_the_ledger_of_the_device_counts_recordings(reference: References) -> None:
    config, num_bytes = config_of(reference("llama")), list[int]()
    for graphs in (False, True):
        runtime = Runtime(replace(config, model=replace(config.model, graphs=graphs)), device=Recorder())
        (device, _) = runtime.plan([runtime.request("0", [1, 2, 3])]).placement.ledgers
        found = [entry.num_bytes for entry in device.entries if entry.name == "CUDA graphs"]
        assert len(found) == graphs
        num_bytes.append(device.total_bytes)
    assert num_bytes[1] == num_bytes[0] + found[0]


def test_masks_of_a_recording_change_with_the_lengths_of_its_rows() -> None:
    """Recorded while all rows fill the padded size, and so need no mask."""
    cpu, reach, keys = torch.device("cpu"), Reach(), {Reach(): frozenset({(4096, True)})}

    def pass_of(*lengths: int) -> tuple[DecodeRows, PassLayout]:
        rows = DecodeRows((0, 1), tuple(length - 1 for length in lengths), (0, 1), cpu)
        new = [(row, length - 1, length) for row, length in enumerate(lengths)]
        return rows, PassLayout([range(4), range(4, 8)], new, rows, (), cpu, expands=False)

    rows, layout = pass_of(64, 64)
    sizes = fixed.fit_sizes(rows, keys)
    assert sizes is not None
    buffers, ranges = fixed.FixedRows(rows, layout, keys, sizes), rows.token_ranges(reach)
    buffers.fill(*pass_of(50, 60))
    assert ranges.visible_BS is not None
    assert ranges.hidden_BS is not None
    assert ranges.visible_BS.sum(1).tolist() == [50, 60]
    assert ranges.hidden_BS.sum(1).tolist() == [14, 4]
