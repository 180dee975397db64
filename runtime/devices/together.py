"""What ranks have in common that read weights together, and how much memory they may use. It stands alone as runtimes
and ranks meet here, and neither knows what the other needs.
"""

from collections.abc import Callable
from dataclasses import replace

from ..config import Way
from ..plan.placement.placement import Budgets
from ..ranks.collectives import Collectives
from ..ranks.gathering import Gathering
from ..ranks.ranks import Ranks
from ..ranks.shared_memory import SharedMemory
from ..stream.fillings import Together
from .agreement import Agreement
from .tensor_agreement import PassAgreement


def made_memory(ranks: Ranks) -> SharedMemory | None:
    """The memory that rank 0 tells the others of; None where ranks do without. Raises ConfigError."""
    return SharedMemory.made(ranks) if ranks.sees_memory else None


def begun_together(ranks: Ranks, memory: SharedMemory | None) -> Together:
    """Begins a session as rank 0, once the others have been told of its memory."""
    ranks.begin_session()
    return Collectives(ranks) if memory is None else memory


def joined_together(ranks: Ranks, place: tuple[int, int] | None) -> Together:
    """Begins a session as another rank; `place` is of the memory that rank 0 has told of. Raises ConfigError."""
    return begun_together(ranks, None if place is None else SharedMemory.opened(ranks, place))


def agreement_of(together: Together, should_stop: Callable[[], bool]) -> Agreement:
    """This rank's part in the agreements of a session."""
    return (PassAgreement if isinstance(together, Gathering) else Agreement)(together.ranks, should_stop)


def budgets_of_ranks(ranks: Ranks, own: Budgets) -> Budgets:
    """What all ranks together may use, given what this one's machine and device may: the machine's, where they see its
    memory; otherwise as many times what a rank has where that is least, as all are given equally many rows; or that
    once, where each plans for its part of the model. Of devices the same. All ranks ask at once."""
    met = ranks.exchange({"host_bytes": own.host_bytes, "device_bytes": own.device_bytes})
    least = min(each["host_bytes"] // ranks.machines.count(ranks.machines[rank]) for rank, each in enumerate(met))
    device = None if own.device_bytes is None else min(each["device_bytes"] for each in met)
    if ranks.devices.way is Way.tensor:
        return replace(own, host_bytes=least, device_bytes=device)
    if device is not None:
        own = replace(own, device_bytes=ranks.size * device, num_devices=ranks.size)
    if ranks.sees_memory:
        return own
    return replace(own, host_bytes=ranks.size * least, num_copies=ranks.size)
