"""Every linear backend gives float32's products, and the table that was measured here says which is taken."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from runtime import Runtime
from runtime.config.profiles import BackendTable, LinearBackend
from runtime.config.settings import Tier
from runtime.errors import ConfigError
from runtime.formats.kinds.gguf import GgufRows
from runtime.formats.kinds.rounded import ENCODINGS
from runtime.kernels.compiler import has_bf16_pairs, has_matrix_unit
from runtime.linear import backends
from runtime.linear import blocks as panels
from runtime.linear.backends import BACKENDS, DTYPE_NAMES, choose_backend, fused_linear, linear, supports
from runtime.linear.blocks import dequantize_rows
from runtime.linear.rows import Rows
from runtime.linear.stored import StoredWeight
from runtime.measure.linear import ROWS, fastest_backends
from runtime.measure.machine_cache import save_rates
from runtime.measure.timing import Figure
from runtime.plan.shape.extents import slot_layout
from tests.packed import packed_rows, rounded_rows, words_of
from tests.runtime.test_families import References, Runtimes, config_for, tokens
from tests.runtime.test_machine_cache import RATES
from tests.support import PRODUCT_KINDS, always

OF_16_BITS = (LinearBackend.widened, LinearBackend.pairs)
OF_FLOAT32 = [backend for backend in LinearBackend if backend not in OF_16_BITS]
ANYWHERE = [backend for backend in OF_FLOAT32 if backend is not LinearBackend.tiles]
PAIRED = pytest.mark.skipif(not has_bf16_pairs(), reason="these vectors do not multiply bfloat16 by pairs")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("backend", "compute"),
    [
        (LinearBackend.widened, torch.bfloat16),
        (LinearBackend.widened, torch.float16),
        pytest.param(LinearBackend.pairs, torch.bfloat16, marks=PAIRED),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [1, 8, 130])
def test_inputs_of_16_bits_are_added_up_as_float32_and_rounded_once(
    num_rows: int, backend: LinearBackend, compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "has_matrix_unit", lambda: False)
    x, blocks = random(num_rows, 256).to(compute), [random(288, 256, seed=1).to(compute)]
    expected = (x.double() @ blocks[0].double().t()).to(compute)
    found = linear(x, blocks, always(backend))
    assert found.dtype is compute
    is_other = found != expected
    assert is_other.float().mean() < 0.002, (
        "a sum of float32 between two numbers of 16 bits is seldom rounded otherwise"
    )
    alone = torch.cat([linear(row[None], blocks, always(backend)) for row in x])
    assert torch.equal(found, alone), "a row depends on those beside it"


@PAIRED
@pytest.mark.parametrize("name", [*ENCODINGS, "window4"])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_pairs_are_multiplied_with_what_packed_rows_are_rounded_to(name: str, num_rows: int) -> None:
    numbers = random(320, 576, seed=2)
    rows: Rows = packed_rows(words_of(numbers.numpy())) if name == "window4" else rounded_rows(numbers, name)
    x, plain = random(num_rows, 576).bfloat16(), dequantize_rows(rows, torch.bfloat16)
    assert supports(LinearBackend.pairs, x, [rows])
    assert torch.equal(BACKENDS[LinearBackend.pairs](x, [rows]), BACKENDS[LinearBackend.pairs](x, [plain]))


@PAIRED
def test_inputs_that_begin_inside_of_a_word_go_another_way() -> None:
    numbers, blocks = random(1, 513).bfloat16().flatten(), [random(288, 256, seed=1).bfloat16()]
    x = numbers[1:].view(2, 256)
    assert not supports(LinearBackend.pairs, x, blocks)
    assert torch.equal(linear(x, blocks, always(LinearBackend.pairs)), linear(x, blocks))


@PAIRED
def test_several_weights_are_multiplied_by_pairs_at_once_to_the_same_bits() -> None:
    x, weights = random(5, 256).bfloat16(), [[random(rows, 256, seed=rows).bfloat16()] for rows in (288, 256)]
    found = fused_linear(x, weights, always(LinearBackend.pairs))
    assert all(
        torch.equal(out, BACKENDS[LinearBackend.pairs](x, blocks)) for out, blocks in zip(found, weights, strict=True)
    )


BF16, F16 = torch.bfloat16, torch.float16
PLAIN, CODED = True, False


@pytest.mark.parametrize(
    ("inputs", "has_unit", "has_fast", "is_plain", "num_rows", "chosen"),
    [
        (BF16, False, True, PLAIN, 8, LinearBackend.pairs),
        (BF16, False, True, CODED, 8, LinearBackend.pairs),
        (BF16, False, False, PLAIN, 8, LinearBackend.widened),
        (BF16, True, False, PLAIN, 8, LinearBackend.inputs_first),
        (BF16, True, False, CODED, 8, LinearBackend.widened),
        (BF16, True, False, CODED, 300, LinearBackend.inputs_first),
        (F16, True, True, PLAIN, 8, LinearBackend.widened),
    ],
)
def test_how_16_bits_are_multiplied_without_a_measurement(
    inputs: torch.dtype,
    has_unit: bool,
    has_fast: bool,
    is_plain: bool,
    num_rows: int,
    chosen: LinearBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "has_matrix_unit", lambda: has_unit)
    monkeypatch.setattr(backends, "has_fast_bf16_pairs", lambda: has_fast)
    monkeypatch.setattr(backends, "has_bf16_pairs", lambda: has_fast)
    numbers = random(256, 512)
    block = numbers.to(inputs) if is_plain else rounded_rows(numbers, "int8")
    assert choose_backend(random(num_rows, 512).to(inputs), [block]) is chosen


def test_weights_of_another_dtype_are_rounded_to_that_of_16_bits_first() -> None:
    x = random(4, 256).bfloat16()
    assert choose_backend(x, [x.repeat(80, 1), random(320, 256)]) is LinearBackend.inputs_first


@pytest.mark.parametrize("backend", ANYWHERE)
@pytest.mark.parametrize("stored", DTYPE_NAMES)
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_each_gives_the_product(backend: LinearBackend, stored: torch.dtype, num_rows: int) -> None:
    x, blocks = random(num_rows, 96), [random(rows, 96, seed=rows).to(stored) for rows in (40, 3)]
    right = x.double() @ torch.cat(blocks).double().t()
    torch.testing.assert_close(BACKENDS[backend](x, blocks), right.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [LinearBackend.inputs_first, LinearBackend.onednn])
def test_many_rows_pass_by_larger_panels(backend: LinearBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "PANEL_BYTES", 3 * 96 * 4)
    monkeypatch.setattr(backends, "MOST_PANEL_BYTES", 17 * 96 * 4)
    quantised = GgufRows(torch.randint(0, 60, (8, 3 * 34), dtype=torch.uint8), "Q8_0", 96, None)
    blocks = [random(40, 96).bfloat16(), random(5, 96, seed=1), quantised]
    heights = [len(panel) for _, panel in panels.panels(blocks, torch.float32, backends._panel_bytes(random(300, 96)))]
    assert heights == [17, 17, 6, 5, 3, 3, 2]
    x = random(300, 96)
    right = x.double() @ torch.cat([panels.dequantize_rows(block, torch.float64) for block in blocks]).double().t()
    torch.testing.assert_close(BACKENDS[backend](x, blocks), right.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("has_unit", "can_compile", "chosen"),
    [
        (True, True, [LinearBackend.tiles] * 5),
        (False, True, [LinearBackend.vectors] * 5),
        (False, False, [LinearBackend.weights_first] * 2 + [LinearBackend.inputs_first] * 3),
    ],
    ids=["matrix unit", "compiler", "neither"],
)
def test_what_is_taken_without_a_measurement(
    has_unit: bool, can_compile: bool, chosen: list[LinearBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "has_matrix_unit", lambda: has_unit)
    monkeypatch.setattr(backends, "has_compiler", lambda: can_compile)
    weight = random(256, 512).bfloat16()
    assert [choose_backend(random(rows, 512), [weight]) for rows in (1, 96, 97, 256, 257)] == chosen


def test_a_table_says_what_is_taken_by_dtype_shape_and_the_nearest_rows() -> None:
    usual, second, third = LinearBackend.weights_first, LinearBackend.onednn, LinearBackend.inputs_first
    table = BackendTable(
        rows=[4, 64], multipliers={"float16, tall": [second, third], "float16 by float16, tall": [third, usual]}
    )
    tall, wide = random(64, 256).half(), random(256, 64).half()
    assert [choose_backend(random(rows, 256), [tall], table) for rows in (1, 15, 17, 500)] == [
        second,
        second,
        third,
        third,
    ]
    assert choose_backend(random(4, 64), [wide], table) is usual
    assert choose_backend(random(4, 256), [tall.float()], table) is usual
    assert [choose_backend(random(rows, 256).half(), [tall], table) for rows in (4, 64)] == [third, usual]
    assert choose_backend(random(4, 64).half(), [wide], table) is LinearBackend.widened


@pytest.mark.parametrize("backend", [LinearBackend.tiles, LinearBackend.vectors])
def test_a_table_cannot_send_to_a_kernel_what_does_not_fit_it(backend: LinearBackend) -> None:
    assert choose_backend(random(4, 30), [random(64, 30).bfloat16()], always(backend)) is LinearBackend.weights_first


def test_quantised_rows_go_by_the_rule() -> None:
    table = always(LinearBackend.onednn)
    rows = GgufRows(torch.zeros(8, 34, dtype=torch.uint8), "Q8_0", 32, None)
    assert choose_backend(random(4, 32), [rows], table) is LinearBackend.weights_first
    assert not linear(random(4, 32), [rows], table).any()


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "deepseek-v3"])
@pytest.mark.parametrize("backend", OF_FLOAT32)
def test_greedy_tokens_are_equal_whichever_is_taken(
    backend: LinearBackend,
    family: str,
    reference: References,
    opened: Runtimes,
    backend_is: Callable[[LinearBackend], None],
) -> None:
    if backend is LinearBackend.tiles and not has_matrix_unit():
        pytest.skip("this processor has no matrix unit that Linux lets us use")
    ref = reference(family)
    runtime = opened(config_for(ref, Tier.none))
    backend_is(backend)
    assert tokens(runtime, ref.prompts) == ref.expected


def figures(**gflops: tuple[float, float, float]) -> dict[str, Figure]:
    """Of the backends named, whatever the weights and rows; the others' are 1."""
    return {
        f"{m.value}, {kind}, M={rows}": Figure(value=value, low=low, high=high, unit="GFLOP/s")
        for m, kind, rows in product(LinearBackend, PRODUCT_KINDS, ROWS)
        for low, value, high in [gflops.get(m.value, (1.0, 1.0, 1.0))]
    }


@pytest.mark.parametrize(
    ("vectors", "onednn", "chosen"),
    [
        ((99, 100, 101), (104, 104.5, 105), LinearBackend.vectors),
        ((99, 100, 101), (106, 107, 108), LinearBackend.onednn),
        ((99, 100, 107), (106, 107, 108), LinearBackend.vectors),
    ],
    ids=["under 5 %", "faster", "not in all rounds"],
)
def test_another_is_taken_where_it_is_faster_beyond_doubt(
    vectors: tuple[float, float, float], onednn: tuple[float, float, float], chosen: LinearBackend
) -> None:
    table = fastest_backends([1, 8, 64, 512], figures(vectors=vectors, onednn=onednn))
    assert table.rows == [1, 4, 16, 64, 256, 512]
    assert table.fastest("float16", is_tall=True, num_rows=16) is chosen


def test_one_that_was_too_slow_for_many_rows_is_as_fast_as_with_the_most_that_it_was_measured_with() -> None:
    found = figures(vectors=(10, 10, 10), onednn=(20, 20, 20))
    found = {name: each for name, each in found.items() if not (name.startswith("onednn") and "M=512" in name)}
    table = fastest_backends([1, 512], found)
    assert table.fastest("float16", is_tall=True, num_rows=512) is LinearBackend.onednn


def test_a_table_with_a_hole_is_refused() -> None:
    with pytest.raises(ConfigError, match="float16, tall"):
        BackendTable(rows=[1, 2], multipliers={"float16, tall": [LinearBackend.onednn]})


def test_a_run_goes_by_what_was_measured_of_its_host(
    reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.measure.machine_cache.cache_root", lambda: tmp_path)
    config = config_for(reference("llama"))
    before = Runtime(config)
    assert before.model.backends is None
    save_rates(replace(before.host, num_threads=before.host.num_threads + 1), RATES, always(LinearBackend.onednn))
    assert Runtime(config).model.backends is None
    save_rates(before.host, RATES, always(LinearBackend.onednn))
    assert Runtime(config).model.backends == always(LinearBackend.onednn)
    assert before.model.backends is None, "another model that is open goes by what it was opened with"


def test_each_loaded_model_goes_by_a_table_of_its_own(reference: References, opened: Runtimes) -> None:
    model = opened(config_for(reference("llama"), Tier.none)).model
    stage = model.shape.layers[0]
    layout = slot_layout(stage)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for table in (always(LinearBackend.onednn), None):
        weights = replace(model, backends=table).weights_of(stage, buffer, layout.tensor_offsets)
        stored = [weight for weight in weights.values() if isinstance(weight, StoredWeight)]
        assert stored
        assert all(weight.table is table and weight.t().table is table for weight in stored)


@pytest.mark.parametrize("taken", [LinearBackend.onednn, LinearBackend.inputs_first])
def test_a_weight_is_multiplied_by_what_its_table_says(taken: LinearBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[LinearBackend]()
    for each, multiply_by in BACKENDS.items():

        def noted(x: torch.Tensor, blocks: object, each: LinearBackend = each, by: Any = multiply_by) -> torch.Tensor:
            seen.append(each)
            return by(x, blocks)

        monkeypatch.setitem(cast("dict[LinearBackend, object]", BACKENDS), each, noted)
    rows, x = random(64, 256).half(), random(4, 256)
    stack = StoredWeight([[rows], [rows]], (2, 64, 256), torch.float32, is_stacked=True, table=always(taken))
    F.linear(x, stack[1])
    assert seen == [taken]
