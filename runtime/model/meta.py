"""A model without its weights: parameters on the meta device, buffers real."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_SMALL_NUMEL = 1 << 18
_FILLED = (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)


class _WeightsOnMeta(TorchFunctionMode):
    """Inside it, what modules allocate weights with takes no memory: `torch.empty`, and large `zeros`, `ones`, ...

    Everything else (`arange`, `tensor`, small constants) stays real, and so do the buffers computed from it.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is None:
            if func is torch.empty:
                kwargs["device"] = "meta"
            elif func in _FILLED:
                on_meta = func(*args, **(kwargs | {"device": "meta"}))
                if isinstance(on_meta, torch.Tensor) and on_meta.numel() >= _SMALL_NUMEL:
                    return on_meta
        return func(*args, **kwargs)


def build_meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `config`, in eval mode: every parameter on meta, every buffer real and on the CPU.

    Parameters and buffers have the dtype they would have after `from_pretrained(dtype=dtype)`, including those that the
    class keeps in float32. Tied parameters are one object. `config` is copied, not changed. Memory: the buffers, and
    at most a few MiB of small constants per layer while building.
    Raises ValueError, from transformers, when the config's class has no causal language model.
    """
    with _WeightsOnMeta():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    _move_parameters_to_meta(model)
    _restore_buffers(model)
    _keep_float32(model, dtype)
    return model.eval()


def _move_parameters_to_meta(model: PreTrainedModel) -> None:
    moved: dict[nn.Parameter, nn.Parameter] = {}  # by identity: tied parameters stay one object
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in moved:
                moved[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            setattr(module, name, moved[parameter])


def _restore_buffers(model: PreTrainedModel) -> None:
    """Buffers that ended on meta are filled by the class's own initialisation, as from_pretrained fills them."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
                setattr(module, "_is_hf_initialized", False)  # noqa: B010 - transformers' flag, not declared on Module
    model.initialize_weights()


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast what from_pretrained loads in float32 although `dtype` is narrower; the class names it by patterns."""
    patterns: set[str] = set()
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(model._keep_in_fp32_modules_strict or ())
    if not patterns:
        return
    matches = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns)).search
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and matches(name):
            tensor.data = tensor.data.float()
