"""The way from `machine.device` to a device that weights can be streamed to."""

import logging

import torch

from ..errors import ConfigError

log = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """The device of that name, with an index whatever the name says: each thread has a current device of its own, so
    that one without an index would be another to other threads. `auto` is the CPU where nothing else will do. Raises
    ConfigError."""
    if name == "auto":
        return _automatic()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"machine.device={name}: not a device torch knows; use auto, cpu or cuda") from error
    if device.type == "cpu":
        return device
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        raise ConfigError(
            f"machine.device={name}: torch {torch.__version__} finds no accelerator here; use machine=cpu"
        )
    if found.type != device.type:
        raise ConfigError(f"machine.device={name}: this torch {torch.__version__} computes on {found.type} or the CPU")
    return _numbered(name, device)


def _automatic() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return torch.device("cpu")
    lacking = _lacking(found)
    if lacking is None:
        return _numbered("auto", found)
    log.warning("machine.device=auto: the CPU, as torch offers no %s on %s", lacking, found.type)
    return torch.device("cpu")


def _numbered(name: str, device: torch.device) -> torch.device:
    lacking, count = _lacking(device), torch.accelerator.device_count()
    if lacking is not None:
        raise ConfigError(
            f"machine.device={name}: torch offers no {lacking} on {device.type}, which streaming weights takes; "
            "use machine=cpu"
        )
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise ConfigError(
            f"machine.device={name}: torch finds {count} of {device.type} here, {device.type}:0 to {count - 1}"
        )
    return torch.device(device.type, index)


def _lacking(device: torch.device) -> str | None:
    """What of it torch does not offer, as on Apple's devices, where host memory is the device's too."""
    if not hasattr(torch.get_device_module(device), "mem_get_info"):
        return "figure for free memory"
    try:
        torch.Stream(device=device)
    except RuntimeError:
        return "streams"
    return None


def has_bfloat16_units(device: torch.device) -> bool:
    """NVIDIA's have them from Ampere on, compute capability 8.0; torch computes bfloat16 on earlier ones too, by way of
    float32."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.get_device_module(device).get_device_capability(device) >= (8, 0)
