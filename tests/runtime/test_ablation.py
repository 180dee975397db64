"""MoE-Lightning's ablation, simulated on its model and machine."""

from tests.ablation import steps
from tests.moe_shapes import MIXTRAL
from tests.published import machine


def test_each_step_of_the_ablation_is_faster_and_bubbles_fall_by_more_than_half() -> None:
    no_overlap, *others = steps(MIXTRAL.shape(), machine("t4"))
    rates = [step.tokens_per_second for step in others]
    assert rates == sorted(rates)
    assert rates[-1] > 1.5 * no_overlap.tokens_per_second
    cgopipe = others[-1]
    assert cgopipe.policy.num_sequences == no_overlap.policy.num_sequences
    assert cgopipe.busiest is no_overlap.busiest
    assert cgopipe.bubble_seconds < 0.5 * no_overlap.bubble_seconds
    flexgen = others[-2]
    assert flexgen.policy.num_sequences == cgopipe.policy.num_sequences
    assert cgopipe.bubble_seconds < 0.9 * flexgen.bubble_seconds  # whose pages come evenly here too
