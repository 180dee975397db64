"""How fast a machine is, in what a plan's time follows from."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

UNLIMITED = float("inf")


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Of one machine and one compute dtype; what is not named takes no time. Where there are several devices, of all of
    them together.

    `gemm_flops_per_second` maps rows (M) of a product to its rate, with weights as they are stored: what turns them
    into the compute dtype is in it. `attention` is decode attention, by bytes of keys and values, where the model
    computes and on the CPU's workers; `prefill_attention` by FLOPs. `turn_seconds` is what a lane's pass through a
    stage takes beside all that, `pass_seconds` a pass beside its turns.
    """

    disk_bytes_per_second: float
    gemm_flops_per_second: Mapping[int, float]
    link_in_bytes_per_second: float = UNLIMITED  # host -> device, from pinned memory
    link_out_bytes_per_second: float = UNLIMITED
    memory_bytes_per_second: float = UNLIMITED  # of the compute device, read and written by activations
    attention_bytes_per_second: float = UNLIMITED
    cpu_attention_bytes_per_second: float = UNLIMITED
    prefill_attention_flops_per_second: float = UNLIMITED
    turn_seconds: float = 0.0
    pass_seconds: float = 0.0

    def gemm_rate(self, num_rows: float) -> float:
        """Linear between the measured points, constant rate beyond the last, proportional to M below the first."""
        points = sorted(self.gemm_flops_per_second.items())
        rows, rates = [p[0] for p in points], [p[1] for p in points]
        if num_rows <= rows[0]:
            return rates[0] * num_rows / rows[0]
        for (m0, r0), (m1, r1) in pairwise(points):
            if num_rows <= m1:
                return r0 + (r1 - r0) * (num_rows - m0) / (m1 - m0)
        return rates[-1]
