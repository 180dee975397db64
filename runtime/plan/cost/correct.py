"""Rates corrected by the first passes of a run: what a measurement of a second could not see, these have. Pure, so a
run that is resumed comes to the same rates from the same passes."""

from collections.abc import Mapping
from dataclasses import replace

from .rates import MachineRates
from .simulator import Resource

MOST = 2.0  # a rate is corrected by a factor of 1/2 to 2: beyond, something else than the rate is wrong
LEAST_SECONDS = 0.01  # of a resource's work, below which it says nothing


def corrected(
    rates: MachineRates, measured: Mapping[Resource, float], predicted: Mapping[Resource, float]
) -> MachineRates:
    """`measured` and `predicted` are the seconds that resources worked in the same passes; `rates`, from which was
    predicted, are those of the run's start, so that bounds hold over several corrections.

    What compute is made of, products, attention and Python, is corrected by one factor: passes tell no more.
    """

    def factor(resource: Resource) -> float:
        """Above 1 where the machine is faster than it was taken to be."""
        was, is_said = measured.get(resource, 0.0), predicted.get(resource, 0.0)
        if min(was, is_said) < LEAST_SECONDS:
            return 1.0
        return min(MOST, max(1 / MOST, is_said / was))

    compute = factor(Resource.compute)
    return replace(
        rates,
        disk_bytes_per_second=rates.disk_bytes_per_second * factor(Resource.disk),
        link_in_bytes_per_second=rates.link_in_bytes_per_second * factor(Resource.link_in),
        link_out_bytes_per_second=rates.link_out_bytes_per_second * factor(Resource.link_out),
        cpu_attention_bytes_per_second=rates.cpu_attention_bytes_per_second * factor(Resource.cpu),
        gemm_flops_per_second={m: rate * compute for m, rate in rates.gemm_flops_per_second.items()},
        expert_flops_per_second={m: rate * compute for m, rate in rates.expert_flops_per_second.items()},
        memory_bytes_per_second=rates.memory_bytes_per_second * compute,
        attention_bytes_per_second=rates.attention_bytes_per_second * compute,
        prefill_attention_flops_per_second=rates.prefill_attention_flops_per_second * compute,
        turn_seconds=rates.turn_seconds / compute,
        pass_seconds=rates.pass_seconds / compute,
    )
