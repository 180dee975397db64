"""Loaded weights that a class's own initialisation overwrites.

`from_pretrained` runs the initialisation of every module behind the loading; transformers' functions leave alone what
is marked as loaded. A class that takes a view first loses the mark: Youtu sets the row of its padding token to zero,
whatever the checkpoint holds, and with a tied head that token's logits with it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ..errors import ConfigError

MARK = "_is_hf_initialized"  # transformers' own, on parameters and modules


class _Writes(TorchDispatchMode):
    """Records operations that write to the parameters of a model, and where."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in model.named_parameters()}
        self.found = list[tuple[str, str, torch.Tensor]]()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, torch.Tensor) and target.is_meta:
            name = self._names.get(target.untyped_storage()._cdata)
            if name is not None:
                self.found.append((name, func._schema.name.partition("::")[2], target))
        return func(*args, **(kwargs or {}))


def initialize_again(model: PreTrainedModel) -> None:
    """Runs the class's own initialisation as `from_pretrained` runs it behind the loading: with all parameters and
    saved buffers marked as loaded. Mutates `model`; other buffers get the numbers that the class computes."""
    for tensor in model.state_dict(keep_vars=True).values():
        setattr(tensor, MARK, True)
    for module in model.modules():
        setattr(module, MARK, not module._parameters)
    model.initialize_weights()


def zeroed_rows(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Rows of matrices, by parameter name, that are zero behind `from_pretrained` whatever the checkpoint holds.

    `model` has its parameters on the meta device; mutated as by `initialize_again`. Raises ConfigError where the class
    overwrites loaded weights in any other way.
    """
    with _Writes(model) as writes:
        initialize_again(model)
    rows: dict[str, tuple[int, ...]] = {}
    for name, operation, target in writes.found:
        width = model.get_parameter(name).shape[-1]
        if operation != "zero_" or target.shape != (width,) or target.stride() != (1,):
            raise ConfigError(
                f"model.path: {type(model).__name__} overwrites loaded weights as transformers loads them "
                f"({operation} of {tuple(target.shape)} numbers of {name!r}), which is not done here: use transformers "
                "itself"
            )
        rows[name] = (*rows.get(name, ()), target.storage_offset() // width)
    return rows
