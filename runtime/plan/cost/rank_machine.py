"""The machine as one of several ranks sees it: a device of its own beside its share of a host, and how fast the others
bring it weights, or what they made of a layer.
"""

from dataclasses import replace

from ...config.profiles import DeviceLink
from ...config.settings import DividedExperts, Way
from ..shape.model import ModelShape
from ..shape.rank_shares import has_whole
from ..shape.shapes import Stage, inner_size
from .links import Fabric
from .machine import Machine
from .rates import UNLIMITED, MachineRates

NUM_GATHERS = (
    4  # of a layer whose matrices are cut by rows: what attends, its projection, the activations, their product
)


def rank_machine(
    machine: Machine, shape: ModelShape, way: Way, num_ranks: int, experts: DividedExperts = DividedExperts.auto
) -> Machine:
    """The share of each of `num_ranks` ranks of a `machine` as `machine_of` describes it. `shape` is the whole model.
    Raises ConfigError where so many do not go onto the machine."""
    if way is Way.one:
        return machine
    per_node = machine.fabric.num_per_node(num_ranks)
    rates = _share(machine, per_node)
    if way is Way.tensor:
        rates = _exchanging(rates, machine.fabric, shape, num_ranks, experts)
    elif way is Way.sharded:
        rates = _sharing(rates, machine, num_ranks, num_ranks // per_node)
    return replace(
        machine,
        host_bytes=machine.host_bytes // per_node,
        num_sharers=_num_sharers(machine, num_ranks, per_node) if way is Way.sharded else 1,
        rates=rates,
    )


def _num_sharers(machine: Machine, num_ranks: int, per_node: int) -> int:
    """Ranks that have the weights of a host's memory between them. Devices hand each other what their hosts lack; in
    front of none, ranks of several hosts hold all weights each."""
    return num_ranks if machine.device_bytes is not None or per_node == num_ranks else 1


def _share(machine: Machine, count: int) -> MachineRates:
    """The rates that each of `count` ranks of a host has, if all work at once."""
    rates = machine.rates
    found = replace(
        rates,
        disk_bytes_per_second=rates.disk_bytes_per_second / count,
        host_memory_bytes_per_second=rates.host_memory_bytes_per_second / count,
        cpu_attention_bytes_per_second=rates.cpu_attention_bytes_per_second / count,
        cpu_flops_per_second=None if rates.cpu_flops_per_second is None else rates.cpu_flops_per_second / count,
    )
    if machine.device_bytes is not None:
        fed = machine.fabric.host_bytes_per_second / count
        return replace(
            found,
            link_in_bytes_per_second=min(rates.link_in_bytes_per_second, fed),
            link_out_bytes_per_second=min(rates.link_out_bytes_per_second, fed),
        )
    return replace(
        found,
        gemm_flops_per_second={rows: rate / count for rows, rate in rates.gemm_flops_per_second.items()},
        expert_flops_per_second={rows: rate / count for rows, rate in rates.expert_flops_per_second.items()},
        memory_bytes_per_second=rates.memory_bytes_per_second / count,
        attention_bytes_per_second=rates.attention_bytes_per_second / count,
        prefill_attention_flops_per_second=rates.prefill_attention_flops_per_second / count,
    )


def _sharing(rates: MachineRates, machine: Machine, num_ranks: int, num_nodes: int) -> MachineRates:
    disk = num_ranks * rates.disk_bytes_per_second  # of all hosts: each byte is read once
    if machine.device_bytes is None:
        gathered = UNLIMITED if num_nodes == 1 else machine.fabric.gather_bytes_per_second(num_ranks)
        return replace(rates, disk_bytes_per_second=_in_turn(disk, gathered))
    own = rates.link_in_bytes_per_second
    if machine.fabric.device is DeviceLink.host:
        shards = _in_turn(own, _beyond(num_nodes, machine.fabric))
    else:
        shards = _in_turn(num_ranks * own, machine.fabric.gather_bytes_per_second(num_ranks))
    return replace(
        rates,
        disk_bytes_per_second=disk,
        shard_bytes_per_second=shards,
        host_memory_bytes_per_second=UNLIMITED,  # these rates are of all ranks' bytes, of which a host sees a part
    )


def _exchanging(
    rates: MachineRates, fabric: Fabric, shape: ModelShape, num_ranks: int, experts: DividedExperts
) -> MachineRates:
    """What a layer of cut matrices gathers of a token, beside its hidden vector: queries' answers and their projection,
    the activations of its feed-forward, or outputs of whole experts, and their product or sum."""
    inner = [_inner_numbers(stage, shape, num_ranks, experts) for stage in shape.layers]
    width = shape.num_heads * shape.head_dim + sum(inner) / max(1, len(inner)) + 2 * shape.hidden_size
    gathered = fabric.gather_bytes_per_second(num_ranks)
    return replace(
        rates,
        exchange_bytes_per_second=gathered * shape.hidden_size / width,
        exchange_seconds=NUM_GATHERS * fabric.gather_seconds(num_ranks),
    )


def _inner_numbers(stage: Stage, shape: ModelShape, num_ranks: int, experts: DividedExperts) -> float:
    """What ranks send one another between the matrices of a feed-forward, or of all experts that a token visits; or
    what each of those makes, where it is whole, to the rank that adds it up."""
    if has_whole(stage, shape.hidden_size, num_ranks, experts):
        return stage.num_experts_per_token * shape.hidden_size / num_ranks
    return stage.num_experts_per_token * inner_size(stage, shape.hidden_size) or shape.intermediate_size


def _beyond(num_nodes: int, fabric: Fabric) -> float:
    """How fast a host gets whole pages of which the others have all but its share."""
    return UNLIMITED if num_nodes == 1 else fabric.node_bytes_per_second * num_nodes / (num_nodes - 1)


def _in_turn(*rates: float) -> float:
    """The rate of bytes that go over one link after another; a slot has a page on one of them at a time."""
    return 1 / sum(1 / rate for rate in rates)
