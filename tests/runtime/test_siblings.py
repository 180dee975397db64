"""Products of weights that a module multiplies by the same inputs are made at once, and are those of each alone."""

from collections.abc import Callable, Sequence

import pytest
import torch

from runtime.config import Tier
from runtime.linear import siblings as module
from runtime.linear.panels import Block
from runtime.linear.siblings import Siblings
from runtime.profiles import Multiplier
from tests.runtime.test_families import References, Runtimes, config_for, tokens

M, K = 5, 64
BLOCKS = {
    name: [torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()]
    for name, rows in {"q": 64, "k": 40, "v": 33, "o": 96}.items()
}


class Asked:
    """What goes to products, by the heights of the weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.alone: list[int] = []
        self.together: list[list[int]] = []
        multiply, multiply_all = module.multiply, module.multiply_all

        def one(x_MK: torch.Tensor, blocks: Sequence[Block], table: object) -> torch.Tensor:
            self.alone.append(blocks[0].shape[0])
            return multiply(x_MK, blocks)

        def several(x_MK: torch.Tensor, weights: Sequence[Sequence[Block]], table: object) -> list[torch.Tensor]:
            self.together.append([blocks[0].shape[0] for blocks in weights])
            return multiply_all(x_MK, weights)

        monkeypatch.setattr(module, "multiply", one)
        monkeypatch.setattr(module, "multiply_all", several)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def run(siblings: Siblings, *names: str, turns_after: str = "") -> None:
    """The module once, `x` is another one behind `turns_after`; each product is right."""
    with siblings.gathered(BLOCKS):
        x = torch.randn(M, K)
        for name in names:
            right = x @ BLOCKS[name][0].float().t()
            torch.testing.assert_close(siblings.product(x, x, name), right, rtol=1e-5, atol=1e-4)
            x = torch.randn(M, K) if name == turns_after else x


def test_what_met_the_same_inputs_at_first_is_multiplied_at_once(asked: Asked) -> None:
    siblings = Siblings()
    run(siblings, "q", "k", "v", "o", turns_after="v")
    assert (asked.alone, asked.together) == ([64, 40, 33, 96], [])
    for _ in range(2):
        run(siblings, "q", "k", "v", "o", turns_after="v")
    assert (asked.alone[4:], asked.together) == ([96, 96], [[64, 40, 33]] * 2)


def test_what_is_not_asked_for_again_is_not_made_again(asked: Asked) -> None:
    siblings = Siblings()
    run(siblings, "q", "k", "v")
    run(siblings, "q", "k")
    assert asked.together == [[64, 40, 33]]
    run(siblings, "q", "k", "v")
    assert (asked.alone[3:], asked.together) == ([64, 40, 33], [[64, 40, 33]])


def test_other_inputs_get_products_of_their_own(asked: Asked) -> None:
    """As where keys and values come from an encoder, but did not at first."""
    siblings = Siblings()
    run(siblings, "q", "k", "v")
    run(siblings, "q", "k", "v", turns_after="q")
    assert (asked.alone[3:], asked.together) == ([40, 33], [[64, 40, 33]])


def test_one_weight_that_meets_the_same_inputs_twice_is_multiplied_twice(asked: Asked) -> None:
    siblings = Siblings()
    for _ in range(2):
        run(siblings, "o", "o", "k")
    assert asked.alone.count(96) == 3
    assert asked.together == [[96, 40]]


def test_lanes_that_are_inside_at_the_same_time_do_not_mix(asked: Asked) -> None:
    siblings = Siblings()
    run(siblings, "q", "k")
    xs = [torch.randn(M, K) for _ in range(2)]
    with siblings.gathered(BLOCKS), siblings.gathered(BLOCKS):
        found = [siblings.product(xs[lane], xs[lane], name) for name, lane in [("q", 0), ("q", 1), ("k", 0), ("k", 1)]]
    for (name, lane), out in zip([("q", 0), ("q", 1), ("k", 0), ("k", 1)], found, strict=True):
        torch.testing.assert_close(out, xs[lane] @ BLOCKS[name][0].float().t(), rtol=1e-5, atol=1e-4)


def test_neither_weights_nor_inputs_are_kept(asked: Asked) -> None:
    siblings = Siblings()
    for names in (("q", "k", "v"), ("q", "k", "v"), ("q", "k")):
        run(siblings, *names)
        held = [value for value in vars(siblings).values() if isinstance(value, torch.Tensor)]
        assert not held
        assert not siblings._made
        assert not siblings._blocks


def test_a_failure_inside_leaves_nothing_behind(asked: Asked) -> None:
    siblings = Siblings()
    with pytest.raises(KeyError), siblings.gathered(BLOCKS):
        siblings.product(torch.randn(M, K), torch.randn(M, K), "unknown")
    assert not siblings._blocks


def test_a_llama_makes_four_products_of_a_layers_seven(
    asked: Asked, reference: References, opened: Runtimes, products_go: Callable[[Multiplier], None]
) -> None:
    ref = reference("llama")
    runtime = opened(config_for(ref, Tier.none))
    products_go(Multiplier.vectors)
    assert tokens(runtime, ref.prompts) == ref.expected
    groups = {tuple(heights) for heights in asked.together}
    assert sorted(map(len, groups)) == [2, 3]
