"""Products of weights that a module multiplies by the same inputs are made at once, and are those of each alone."""

from collections.abc import Callable, Sequence

import pytest
import torch

from runtime.config.profiles import LinearBackend
from runtime.config.settings import Tier
from runtime.linear import fused_projections as module
from runtime.linear.blocks import Block
from runtime.linear.fused_projections import FusedProjections
from tests.runtime.test_families import References, Runtimes, config_for, tokens

M, K = 5, 64
BLOCKS = {
    name: [torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()]
    for name, rows in {"q": 64, "k": 40, "v": 33, "o": 96}.items()
}


class RecordedProducts:
    """What goes to products, by the heights of the weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.alone: list[int] = []
        self.together: list[list[int]] = []
        linear, fused_linear = module.linear, module.fused_linear

        def one(x_MK: torch.Tensor, blocks: Sequence[Block], table: object) -> torch.Tensor:
            self.alone.append(blocks[0].shape[0])
            return linear(x_MK, blocks)

        def several(x_MK: torch.Tensor, weights: Sequence[Sequence[Block]], table: object) -> list[torch.Tensor]:
            self.together.append([blocks[0].shape[0] for blocks in weights])
            return fused_linear(x_MK, weights)

        monkeypatch.setattr(module, "linear", one)
        monkeypatch.setattr(module, "fused_linear", several)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedProducts:
    return RecordedProducts(monkeypatch)


def run(projections: FusedProjections, *names: str, turns_after: str = "") -> None:
    """The module once, `x` is another one behind `turns_after`; each product is right."""
    with projections.scope(BLOCKS):
        x = torch.randn(M, K)
        for name in names:
            right = x @ BLOCKS[name][0].float().t()
            torch.testing.assert_close(projections.multiply(x, x, name), right, rtol=1e-5, atol=1e-4)
            x = torch.randn(M, K) if name == turns_after else x


def test_what_met_the_same_inputs_at_first_is_multiplied_at_once(recorded: RecordedProducts) -> None:
    projections = FusedProjections()
    run(projections, "q", "k", "v", "o", turns_after="v")
    assert (recorded.alone, recorded.together) == ([64, 40, 33, 96], [])
    for _ in range(2):
        run(projections, "q", "k", "v", "o", turns_after="v")
    assert (recorded.alone[4:], recorded.together) == ([96, 96], [[64, 40, 33]] * 2)


def test_what_is_not_asked_for_again_is_not_made_again(recorded: RecordedProducts) -> None:
    projections = FusedProjections()
    run(projections, "q", "k", "v")
    run(projections, "q", "k")
    assert recorded.together == [[64, 40, 33]]
    run(projections, "q", "k", "v")
    assert (recorded.alone[3:], recorded.together) == ([64, 40, 33], [[64, 40, 33]])


def test_other_inputs_get_products_of_their_own(recorded: RecordedProducts) -> None:
    """As where keys and values come from an encoder, but did not at first."""
    projections = FusedProjections()
    run(projections, "q", "k", "v")
    run(projections, "q", "k", "v", turns_after="q")
    assert (recorded.alone[3:], recorded.together) == ([40, 33], [[64, 40, 33]])


def test_one_weight_that_meets_the_same_inputs_twice_is_multiplied_twice(recorded: RecordedProducts) -> None:
    projections = FusedProjections()
    for _ in range(2):
        run(projections, "o", "o", "k")
    assert recorded.alone.count(96) == 3
    assert recorded.together == [[96, 40]]


def test_lanes_that_are_inside_at_the_same_time_do_not_mix(recorded: RecordedProducts) -> None:
    projections = FusedProjections()
    run(projections, "q", "k")
    xs = [torch.randn(M, K) for _ in range(2)]
    with projections.scope(BLOCKS), projections.scope(BLOCKS):
        found = [
            projections.multiply(xs[lane], xs[lane], name) for name, lane in [("q", 0), ("q", 1), ("k", 0), ("k", 1)]
        ]
    for (name, lane), out in zip([("q", 0), ("q", 1), ("k", 0), ("k", 1)], found, strict=True):
        torch.testing.assert_close(out, xs[lane] @ BLOCKS[name][0].float().t(), rtol=1e-5, atol=1e-4)


def test_neither_weights_nor_inputs_are_kept(recorded: RecordedProducts) -> None:
    projections = FusedProjections()
    for names in (("q", "k", "v"), ("q", "k", "v"), ("q", "k")):
        run(projections, *names)
        held = [value for value in vars(projections).values() if isinstance(value, torch.Tensor)]
        assert not held
        assert not projections._outputs
        assert not projections._blocks


def test_a_failure_inside_leaves_nothing_behind(recorded: RecordedProducts) -> None:
    projections = FusedProjections()
    with pytest.raises(KeyError), projections.scope(BLOCKS):
        projections.multiply(torch.randn(M, K), torch.randn(M, K), "unknown")
    assert not projections._blocks


def test_a_llama_makes_four_products_of_a_layers_seven(
    recorded: RecordedProducts, reference: References, opened: Runtimes, backend_is: Callable[[LinearBackend], None]
) -> None:
    ref = reference("llama")
    runtime = opened(config_for(ref, Tier.none))
    backend_is(LinearBackend.vectors)
    assert tokens(runtime, ref.prompts) == ref.expected
    groups = {tuple(heights) for heights in recorded.together}
    assert sorted(map(len, groups)) == [2, 3]
