"""`suite=gpu` at toy size: variants run on a CPU and on a double of a device; the table says what was measured."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from benchmarks import contenders
from benchmarks.contenders import VARIANTS, Variant
from benchmarks.gpu import bench, device, missing, progress, random_init, suite
from benchmarks.gpu.__main__ import parse_settings
from benchmarks.gpu.bench import GpuBench, measurements
from benchmarks.gpu.config import MODELS, GpuConfig
from benchmarks.gpu.missing import missing_messages
from benchmarks.gpu.progress import WorkerProgress
from benchmarks.gpu.random_init import INT4, RandomInitModel, RandomInitRuntime, unique_parameters, write_model
from benchmarks.gpu.suite import run_gpu
from benchmarks.gpu.task import GpuMachine, GpuTask, VariantMeasurement
from benchmarks.peers.hugging_face import build_model, generate_batch, offload_model
from benchmarks.task import Result
from runtime import ModelConfig, RuntimeConfig
from runtime.config.settings import DType
from runtime.errors import ConfigError, WeightstreamError
from runtime.measure.bandwidth import LINK_IN
from runtime.plan.shape.extents import SlotLayout, slot_layout
from runtime.plan.shape.shapes import TensorSlice
from runtime.store.checkpoint import open_checkpoint
from runtime.stream.device import ComputeDevice
from runtime.units import GIB, MIB
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.packed import write_packed

ROOT = Path(__file__).resolve().parents[2]
TOY = {
    "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 320, "num_local_experts": 4,
}  # fmt: skip
GPU = GpuConfig(device="cpu", num_layers=6, shape=TOY, num_prompts=8, num_new_tokens=3, device_memory_gib=0.072)
TASK = GpuTask(gpu=GPU, prompt_tokens=20, rounds=1, seconds=600.0)
TOLD = WorkerProgress(time.monotonic())
RESULT = Result(seconds=1.0, prefill_seconds=0.5, rate=1.0, peak_bytes=0, baseline_bytes=0, bytes_read=0, tokens=[[1]])


def found_by(task: GpuTask, device: ComputeDevice) -> Iterator[GpuMachine | VariantMeasurement]:
    return measurements(task, device, TOLD)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_init, "TILE_ELEMENTS", 10_007)
    monkeypatch.setattr(random_init, "TILE_GROUPS", 151)
    monkeypatch.setattr(device, "COPY_BYTES", MIB)
    monkeypatch.setattr(bench, "DEVICE_SHARE", 0.03)  # of so small a device most is room to work in


@pytest.mark.parametrize("model", with_slow_others(MODELS, ["llama"]))
def test_every_way_is_measured_and_bytes_over_the_link_are_counted(model: str) -> None:
    shape = {key: TOY[key] for key in TOY if model == "mixtral" or key != "num_local_experts"}
    if model == "llama":
        shape["intermediate_size"] *= TOY["num_local_experts"]
    gpu = replace(GPU, model=model, shape=shape)
    machine, *answered = found_by(replace(TASK, gpu=gpu), FakeDevice())
    assert isinstance(machine, GpuMachine)
    assert machine.model == f"{MODELS[model].title} in other sizes"
    assert machine.link
    found = {each.variant: each for each in answered if isinstance(each, VariantMeasurement)}
    assert [(name, each.refusal) for name, each in found.items()] == [(variant.name, "") for variant in VARIANTS]
    for variant in VARIANTS:
        result = found[variant.name].result
        assert result is not None
        assert [len(tokens) for tokens in result.tokens] == [3] * (8 // variant.prompt_divisor)
        assert 0 < result.prefill_seconds < result.seconds
        assert bool(result.bytes_copied) == (not variant.is_cut)
        if not variant.is_peer:  # of which the kernel counts what libraries are paged in, too
            assert bool(result.bytes_read) == variant.is_on_disk
        assert bool(found[variant.name].phases) == (not variant.is_peer)
    results = {name: each.result for name, each in found.items() if each.result is not None}
    assert results["weightstream, kv=cpu"].bytes_returned > results["weightstream"].bytes_returned == 0
    assert 0.25 < results["weightstream, int4 store"].bytes_copied / (3 * machine.weight_bytes) < 0.35, (
        "of three passes"
    )
    assert 0 < results["weightstream, offload=auto"].bytes_read < results["weightstream, offload=nvme"].bytes_read
    assert {each.phase for each in found["weightstream"].phases} == {"prefill", "decode"}
    assert {each.num_passes for each in found["weightstream"].phases} == {1, 2}
    assert {each.phase for each in found["weightstream, admission=continuous"].phases} >= {"mixed"}


def test_a_block_is_one_lane_where_all_weights_lie_in_the_device(tmp_path: Path) -> None:
    """As plans have it that are asked for nothing: each lane is launched by itself."""
    measured = GpuBench(TASK, tmp_path, FakeDevice(), TOLD)
    for variant in VARIANTS:
        if not variant.is_peer:
            policy = measured._config(variant).policy
            assert policy.num_micro_batches == (1 if variant.is_cut else 4)
            assert policy.micro_batch_size is not None
            assert policy.num_micro_batches * policy.micro_batch_size >= 8 / variant.prompt_divisor


def test_on_a_cpu_nothing_goes_over_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "VARIANTS", VARIANTS[:1])
    machine, found = found_by(TASK, ComputeDevice("cpu"))
    assert isinstance(machine, GpuMachine)
    assert isinstance(found, VariantMeasurement)
    assert not machine.link
    assert found.result is not None
    assert (found.result.bytes_copied, len(found.result.tokens)) == (0, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_every_way_stays_within_the_memory_that_it_may_use() -> None:
    limit = replace(GPU, device="cuda", device_memory_gib=1.0)
    _, *answered = found_by(replace(TASK, gpu=limit), ComputeDevice("cuda"))
    found = [each for each in answered if isinstance(each, VariantMeasurement)]
    assert [(each.variant, each.refusal) for each in found] == [(variant.name, "") for variant in VARIANTS]
    assert all(each.result is not None and 0 < each.result.peak_device_bytes <= GIB for each in found)


def test_a_way_that_fails_is_named_once_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: GpuBench, variant: Variant) -> VariantMeasurement:
        if variant.name == "accelerate cpu_offload":
            raise RuntimeError("no hooks")
        return VariantMeasurement(variant=variant.name, num_layers=3, result=RESULT)

    monkeypatch.setattr(GpuBench, "measure", measure)
    _, *found = found_by(replace(TASK, rounds=2), ComputeDevice("cpu"))
    refused = [each for each in found if isinstance(each, VariantMeasurement) and each.refusal]
    assert [(each.variant, each.refusal) for each in refused] == [("accelerate cpu_offload", "RuntimeError: no hooks")]
    assert len(found) == 2 * len(VARIANTS) - 1


def test_nothing_begins_that_took_longer_than_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def measure(self: GpuBench, variant: Variant) -> VariantMeasurement:
        now[0] += 50.0 if variant.is_peer else 10.0
        return VariantMeasurement(variant=variant.name, num_layers=3, result=RESULT)

    monkeypatch.setattr(GpuBench, "measure", measure)
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    _, *found = found_by(replace(TASK, rounds=3, seconds=330.0), ComputeDevice("cpu"))
    again = [each.variant for each in found if isinstance(each, VariantMeasurement)][len(VARIANTS) :]
    assert now[0] <= 330.0
    assert again == [variant.name for variant in VARIANTS if not variant.is_peer]


@pytest.mark.parametrize("has_room", [True, False])
def test_a_peer_whose_copies_of_experts_have_no_room_gets_its_whole_batch_without_them(
    model: RandomInitModel, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device transformers' `generate` copies the weights of each visit in passes that decode."""
    by_visit, copies = ALL_EXPERTS_FUNCTIONS["batched_mm"], list[int]()

    def counted(module: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
        copies.append(len(args[0]))
        if not has_room:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 56.00 GiB")
        return by_visit(module, *args)

    monkeypatch.setitem(ExpertsInterface._global_mapping, "batched_mm", counted)
    tensors = model.weights.tensors(unique_parameters(runtime_of(model)), 1)
    peer, ids = offload_model(build_model(model.path, tensors), ComputeDevice("cpu")), [[5, 6, 7], [8, 9], [10], [11]]
    assert peer.largest_batch(ids, lambda: None) == len(ids)
    tried = len(copies)
    expected = generate_batch(build_model(model.path, tensors), ids, 4, torch.device("cpu"))
    assert peer.measure(ids, 4).tokens == expected
    assert len(copies) == tried + (3 * model.num_layers if has_room else 0)


def test_a_peer_that_lacks_memory_for_one_sequence_raises(
    model: RandomInitModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    for name in ("batched_mm", "grouped_mm"):
        monkeypatch.setitem(ExpertsInterface._global_mapping, name, refuse)
    tensors = model.weights.tensors(unique_parameters(runtime_of(model)), 1)
    with pytest.raises(torch.OutOfMemoryError):
        offload_model(build_model(model.path, tensors), ComputeDevice("cpu")).largest_batch([[5, 6], [7]], lambda: None)


@pytest.fixture
def model(tmp_path: Path) -> RandomInitModel:
    return write_model(GPU, tmp_path, 2)


def runtime_of(model: RandomInitModel) -> RandomInitRuntime:
    config = RuntimeConfig(model=ModelConfig(path=str(model.path), dtype=DType.bfloat16))
    return RandomInitRuntime(config, ComputeDevice("cpu"), model.weights)


def test_a_sparse_checkpoint_takes_no_disk(model: RandomInitModel) -> None:
    files = list(model.path.glob("*.safetensors"))
    assert sum(512 * file.stat().st_blocks for file in files) < sum(file.stat().st_size for file in files) / 4


def test_weights_are_the_same_as_bytes_of_a_stage_and_as_tensors(
    model: RandomInitModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_init, "CHUNK_BYTES", 4096)
    runtime = runtime_of(model)
    tensors, layout = (
        model.weights.tensors(unique_parameters(runtime), 2),
        slot_layout(stage := runtime.model.shape.layers[1]),
    )
    buffer = runtime.device.host_buffer(layout.num_bytes)
    with runtime.reader() as reader:
        reader.submit(layout.extents, buffer.numpy().data).wait()
    for parameter in stage.parameters:
        flat = tensors[parameter.name].view(-1).view(torch.uint8)
        for piece, part in zip(parameter.slices, flat.split([p.num_bytes for p in parameter.slices]), strict=True):
            begin = layout.tensor_offsets[piece.name]
            assert torch.equal(part, buffer[begin : begin + piece.num_bytes])


def test_a_store_of_four_bits_has_the_tensors_of_a_packed_one_and_normal_numbers(tmp_path: Path) -> None:
    model, plain = write_model(GPU, tmp_path, 2, INT4), write_model(GPU, tmp_path, 2)
    plain.weights.write(1)
    out = write_packed(plain.path, tmp_path / "packed", INT4)
    found, packed = (
        {name: (tensor.dtype, tensor.shape) for name, tensor in open_checkpoint(path).tensors.items()}
        for path in (model.path, out)
    )
    rounded = {name for name in packed if name.endswith(("int4-groups", "_scales"))}
    assert {name: found[name] for name in rounded} == {name: packed[name] for name in rounded}
    assert not any(name.endswith(("int4-groups", "_scales")) for name in found.keys() - rounded)
    runtime, numbers = runtime_of(model), runtime_of(plain)
    assert runtime.model.shape.weight_bytes < 0.5 * numbers.model.shape.weight_bytes
    layer = runtime.model.shape.layers[1]
    layout, buffer = slot_layout(layer), runtime.device.host_buffer(slot_layout(layer).num_bytes)
    with runtime.reader() as reader:
        reader.submit(layout.extents, buffer.numpy().data).wait()
    projection = next(each for each in layer.parameters if each.name.endswith("o_proj.weight"))
    ((piece,),) = projection.pieces
    weights = plain.weights.tensors(unique_parameters(numbers), 1)["model.layers.1.self_attn.o_proj.weight"].float()
    codes, scales = (bytes_at(buffer, layout, part).view(len(weights), -1) for part in piece.with_companions())
    decoded = INT4.decode(codes, scales.view(torch.bfloat16))
    assert decoded.std().item() == pytest.approx(weights.std().item(), rel=0.1)
    assert len(decoded.unique(dim=0)) == len(decoded)


def bytes_at(buffer: torch.Tensor, layout: SlotLayout, piece: TensorSlice) -> torch.Tensor:
    begin = layout.tensor_offsets[piece.name]
    return buffer[begin : begin + piece.num_bytes]


def test_a_model_of_fewer_layers_has_the_first_ones_of_another(model: RandomInitModel, tmp_path: Path) -> None:
    fewer = write_model(GPU, tmp_path, 1)
    mine, theirs = (each.weights.tensors(unique_parameters(runtime_of(each)), 1) for each in (fewer, model))
    assert mine.keys() < theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_matrices_are_random_with_the_deviation_of_a_checkpoint_and_no_row_comes_twice(model: RandomInitModel) -> None:
    tensors = model.weights.tensors(unique_parameters(runtime_of(model)), 1)
    experts = tensors["model.layers.0.mlp.experts.gate_up_proj"].float()
    assert experts.std().item() == pytest.approx(2 * 128**-0.5, rel=0.05)
    rows = experts[0]
    assert len(rows.unique(dim=0)) == len(rows)
    assert tensors["model.norm.weight"].abs().eq(1).all()


def measurement(variant: Variant, rate: float, token: int) -> VariantMeasurement:
    result = replace(
        RESULT, seconds=2.0, rate=rate, tokens=[[token]], bytes_copied=0 if variant.is_cut else 48 * 10**9,
        peak_device_bytes=GIB,
    )  # fmt: skip
    return VariantMeasurement(
        variant=variant.name, num_layers=2 if variant.is_cut else 4, num_sequences=1, result=result
    )


def test_the_table_says_rates_ratios_and_the_share_of_the_link() -> None:
    machine = GpuMachine(device="gpu", link={LINK_IN: 50.0}, num_layers=4, weight_bytes=GIB)
    found = [measurement(variant, 10.0 if variant.is_peer else 30.0, int(variant.is_peer)) for variant in VARIANTS]

    def work(task: GpuTask) -> Iterator[str]:
        yield json.dumps(asdict(machine))
        yield from (json.dumps(asdict(each)) for each in found)
        raise WeightstreamError("the machine is gone")

    said: list[str] = []
    done = run_gpu(GPU, 20, 3, said.append, work)
    times = "0.50 s | 1.50 s | 1 GiB"
    assert len(said) == 2 + len(VARIANTS) + len(list(missing_messages()))
    assert f"| weightstream | 4 | 1 | 30.0 (30.0-30.0) | 3.00 | {times} | 44.7 GiB | 48% | 1 of 1 |" in done.table
    assert f"| transformers in the device | 2 | 1 | 10.0 (10.0-10.0) | 1.00 | {times} | - | - | 0 of 1 |" in done.table
    assert "the worker cannot run here: the machine is gone" in done.table
    assert done.rounds.keys() == {variant.name for variant in VARIANTS}


def test_a_worker_says_what_it_begins_with_its_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench, "VARIANTS", [each for each in VARIANTS if each.name in ("weightstream", "weightstream, kv=cpu")]
    )
    monkeypatch.setattr(progress, "MIN_REPORTED_BYTES", 1)
    list(found_by(TASK, FakeDevice()))
    said = capsys.readouterr().err.splitlines()
    assert all(re.match(r" *\d+\.\d s  \S", line) for line in said), said
    steps = [line.split(" s  ", 1)[1] for line in said]
    own = steps[steps.index("weightstream, round 1") : steps.index("weightstream, kv=cpu, round 1")]
    for wanted in ("waiting for kernels", "planning", "generating", "warm-up passes", "measured passes"):
        assert any(step.startswith(wanted) for step in own), (wanted, own)


def test_amounts_are_told_at_once_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told = WorkerProgress(90.0)
    for _ in range(12):
        told.count_bytes("pinning", GIB)
        now[0] += 1.0
    told.begin_variant("another")
    told.count_bytes("pinning", GIB)
    assert capsys.readouterr().err.splitlines() == [
        "  10.0 s  pinning 1 GiB so far", "  15.0 s  pinning 6 GiB so far", "  20.0 s  pinning 11 GiB so far",
        "  22.0 s  another", "  22.0 s  pinning 1 GiB so far",
    ]  # fmt: skip


def test_what_no_time_was_left_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that was never measured, what the slowest of its kind took is what it would take."""
    now = [100.0]

    def measure(self: GpuBench, variant: Variant) -> VariantMeasurement:
        now[0] += 20.0
        return VariantMeasurement(variant=variant.name, num_layers=3, result=RESULT)

    monkeypatch.setattr(GpuBench, "measure", measure)
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    _, *found = found_by(replace(TASK, start_time=60.0, seconds=90.0), ComputeDevice("cpu"))
    refusals = [each.refusal for each in found if isinstance(each, VariantMeasurement)]
    assert now[0] <= 60.0 + 90.0
    assert refusals.count("") == 2
    assert {each for each in refusals if each} == {"no time left of gpu.minutes=8"}


def test_an_interrupted_command_has_a_table_and_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[bool]()

    def work(task: GpuTask) -> Iterator[str]:
        begun.append(task.is_alone)
        yield json.dumps(asdict(GpuMachine(device="gpu", link={}, num_layers=4, weight_bytes=GIB)))
        yield json.dumps(asdict(measurement(VARIANTS[0], 30.0, 0)))
        raise KeyboardInterrupt

    monkeypatch.setattr(contenders, "find_spec", lambda name: name)
    done = run_gpu(GPU, 20, 1, lambda line: None, work)
    assert done.is_interrupted
    assert begun == [False]
    assert "| weightstream | 4 | 1 | 30.0" in done.table
    assert "the command was interrupted" in done.table


def test_a_worker_whose_time_is_up_before_it_measured_has_a_table_that_says_so() -> None:
    def work(task: GpuTask) -> Iterator[str]:
        yield json.dumps(asdict(GpuMachine(device="gpu", link={}, num_layers=4, weight_bytes=GIB)))
        raise WeightstreamError("the worker was stopped")

    done = run_gpu(GPU, 20, 1, lambda line: None, work)
    assert done.table.startswith("gpu, limited to ")
    assert "the worker cannot run here: the worker was stopped" in done.table
    assert not done.is_interrupted


def test_a_worker_is_stopped_a_share_of_its_time_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()

    def made(**settings: object) -> object:
        limits.append(settings["limit"].seconds)  # pyright: ignore[reportAttributeAccessIssue]
        return SimpleNamespace(lines=lambda: iter(()))

    monkeypatch.setattr(suite, "WorkerProcess", made)
    for seconds in (60.0, 480.0):
        suite.read_worker_lines(replace(TASK, seconds=seconds))
    assert limits == [72.0, 525.0]


def test_no_way_may_take_more_of_the_device_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    caps: list[int] = []

    def measured(self: GpuBench, variant: Variant) -> VariantMeasurement:
        return VariantMeasurement(variant=variant.name, num_layers=3, result=RESULT)

    monkeypatch.setattr(bench, "limit_memory", lambda device, num_bytes: caps.append(num_bytes))
    for name in ("_weightstream", "_peer"):
        monkeypatch.setattr(GpuBench, name, measured)
    list(found_by(replace(TASK, gpu=replace(GPU, num_layers=2)), ComputeDevice("cpu")))
    assert caps == len(VARIANTS) * [int(GPU.device_memory_gib * GIB)]


def test_a_way_that_would_measure_something_else_is_left_out_and_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(self: GpuBench, variant: Variant) -> VariantMeasurement:
        return VariantMeasurement(variant=variant.name, num_layers=3, result=RESULT)

    monkeypatch.setattr(GpuBench, "measure", measure)
    monkeypatch.setattr(contenders, "find_spec", lambda name: None if name == "numba" else name)
    assert [
        line for line in missing_messages() if line.startswith("numba is not installed: 'weightstream, attention=cpu'")
    ]
    _, *found = found_by(TASK, ComputeDevice("cpu"))
    refused = {each.variant: each.refusal for each in found if isinstance(each, VariantMeasurement) and each.refusal}
    assert refused == {"weightstream, attention=cpu": "numba is not installed"}


def test_without_what_weightstream_cannot_do_without_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "find_spec", lambda name: None if name == "greenlet" else name)
    said: list[str] = []
    with pytest.raises(WeightstreamError, match="not installed: greenlet"):
        run_gpu(GPU, 20, 1, said.append, lambda task: pytest.fail("a worker was started"))
    assert any(line.startswith("greenlet is not installed") and "gpu-first-run.md" in line for line in said)


def test_a_version_outside_of_what_the_project_names_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "version", lambda name: "2.4.1+cu130" if name == "torch" else "5.17.0")
    assert [line[:20] for line in missing_messages() if "not a tested" in line and line.startswith("t")] == [
        "torch 2.4.1 is insta"
    ]


def test_the_plain_command_takes_the_keys_of_the_job() -> None:
    found = parse_settings(["toy", "gpu.device=cuda:1", "gpu.minutes=2", 'gpu.shape={"hidden_size": 64}', "rounds=2"])
    assert (found.gpu.device, found.gpu.minutes, found.gpu.shape, found.rounds) == ("cuda:1", 2, {"hidden_size": 64}, 2)
    assert parse_settings([]).gpu == GpuConfig()
    assert "num_local_experts" in parse_settings(["toy"]).gpu.shape
    assert "num_local_experts" not in parse_settings(["toy", "gpu.model=llama"]).gpu.shape
    for wrong, key in (("gpu.minuts=2", "gpu.minutes"), ("minutes", "KEY=VALUE"), ("gpu.num_layers=x", "num_layers")):
        with pytest.raises(ConfigError, match=key):
            parse_settings([wrong])


MISSING = ("hydra", "omegaconf", "datasets", "pyarrow", "numba", "matplotlib", "accelerate")
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({MISSING!r})); import benchmarks.gpu.__main__"


@pytest.mark.slow(
    "benchmarks/test_bench_gpu.py::test_a_way_that_would_measure_something_else_is_left_out_and_says_what_it_lacks"
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_where_a_plain_image_lacks_modules_and_an_accelerator_the_worker_runs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`sitecustomize` is what a Python imports first."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with pytest.raises(WeightstreamError, match="exit code 2"):
        run_gpu(replace(GPU, device="cuda"), 20, 1, print)
    said = capfd.readouterr().err
    assert "gpu.device=cuda" in said
    assert "Error" not in said


def test_impossible_settings_name_the_key() -> None:
    for key, value in (("num_layers", 0), ("num_new_tokens", 1), ("minutes", 0.0)):
        with pytest.raises(ConfigError, match=rf"gpu\.{key}"):
            GpuConfig(**{key: value})
    with pytest.raises(ConfigError, match=r"gpu\.num_layers"):
        GpuConfig(shape={"num_hidden_layers": 2})
    with pytest.raises(ConfigError, match=r"gpu\.model must be one of mixtral, llama, got 'gpt'"):
        GpuConfig(model="gpt")
