"""Which device is whose: each rank of a machine has an accelerator of its own, and all compute in the same numbers. It
stands alone as nothing else looks at both ranks and what torch finds on a machine.
"""

from collections import Counter

import torch

from ..config.settings import Way
from ..errors import ConfigError, require
from ..model.loading import LoadedModel
from ..ranks.ranks import Ranks
from ..stream.device import ComputeDevice
from ..stream.device_choice import choose_device


def device_of(ranks: Ranks | None, name: str) -> ComputeDevice:
    """The device that this process computes on. Each of several ranks takes another one of its machine's accelerators,
    or where a launcher lets it see but one, that. Raises ConfigError."""
    if ranks is None:
        return ComputeDevice(name)
    found = choose_device(name)
    count = 0 if found.type == "cpu" else torch.accelerator.device_count()
    if count < 2 or ":" in name:
        return ComputeDevice(name)
    return ComputeDevice(str(torch.device(found.type, place_of(ranks.num_before_here, ranks.num_here, count))))


def place_of(place: int, num_here: int, count: int) -> int:
    """The number of the accelerator, of `count`, that rank `place` of the `num_here` on a machine takes. Raises
    ConfigError."""
    require(
        num_here <= count,
        f"devices: {num_here} ranks are on this machine, and torch finds {count} accelerators: start one rank for "
        "each, or set machine=cpu",
    )
    return place


def require_alike(ranks: Ranks, model: LoadedModel, device: ComputeDevice) -> None:
    """All ranks ask at once. Raises ConfigError where two have one accelerator between them, or they would come to
    other numbers."""
    kind = "accelerator" if device.is_accelerator else "processor"
    own = {"kind": kind, "dtype": str(model.compute_dtype).removeprefix("torch."), "device": _identity(device)}
    met = ranks.exchange({**own, "name": _name(device)})
    known = Counter((ranks.machines[rank], each["device"]) for rank, each in enumerate(met) if each["device"])
    shared = [device for (_, device), times in known.items() if times > 1]
    require(
        not shared,
        f"devices: several ranks of a machine have the same accelerator ({', '.join(shared)}): leave its number out of "
        "machine.device, and start as many ranks as there are accelerators",
    )
    for rank, each in enumerate(met):
        _require_same(rank, each["kind"], kind, "on", "set machine=cpu, or machine.device")
        _require_same(rank, each["dtype"], own["dtype"], "in", "set model.dtype")
        if ranks.devices.way is Way.tensor:
            _require_same(rank, each["name"], _name(device), "on", "take devices=sharded or pipeline")


def _require_same(rank: int, found: str, own: str, how: str, remedy: str) -> None:
    if found != own:
        raise ConfigError(f"devices: rank {rank} would compute {how} {found}, this one {how} {own}: {remedy}")


def _identity(device: ComputeDevice) -> str:
    """The name of an accelerator by which all processes know it; empty where nothing tells."""
    if device.torch_device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device.torch_device).uuid)


def _name(device: ComputeDevice) -> str:
    """The kind of an accelerator. Processors of one kind are not told apart here."""
    if device.torch_device.type == "cpu":
        return "a processor"
    return str(torch.get_device_module(device.torch_device).get_device_name(device.torch_device))
