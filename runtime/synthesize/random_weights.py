"""Draws random values for the checkpoint tensors of a model on the meta device.

The generator is seeded by (seed, tensor name), so values do not depend on the order of tensors or the size of shards.
The standard deviations are chosen so that activations are near one, logits have a standard deviation of 1 to 3, and
greedy decoding does not repeat itself.
"""

import copy
import hashlib
import math
import re

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from ..store.writer import TensorSpec

_EMBEDDING_STD = 0.02
_TIED_LOGITS_STD = 1.5
_HEAD_LOGITS_STD = 2.0
_BIAS_STD = 0.02
# Factor of the standard deviation of matrices. With 2, attention selects few tokens. With 1, it averages all of them,
# and greedy decoding repeats short cycles.
_GAIN = 2.0
_HEAD_NORM = re.compile(r"\b[qk]_(layer)?norm$")
_CHUNK_ELEMENTS = 1 << 20  # values that are drawn at once in float32, then rounded to the checkpoint's dtype
_PROBED_ELEMENTS = 1 << 20  # larger parameters of unknown modules are treated as weight matrices


class RandomWeights:
    """The checkpoint tensors of a model on the meta device: `specs` lists them in the order of writing; `draw` returns
    the values of one."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self._model = model
        self._seed = seed
        # Like save_pretrained, omit tied copies and the keys that the class does not save.
        dropped = set(model._keys_to_ignore_on_save or ()) | set(model.all_tied_weights_keys)
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}
        self._tensors: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
        # Name of a checkpoint tensor -> the (first) parameter that it is loaded into.
        conversions = get_model_conversion_mapping(model)
        renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        rules = (renamings, converters, model.base_model_prefix, state)
        self._origins = {name: rename_source_key(name, *rules)[0] for name in self._tensors}
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        self._has_tied_head = head is not None and head.weight is embeddings.weight
        self.specs = [
            TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        ]

    def draw(self, spec: TensorSpec) -> torch.Tensor:
        """Returns the values of a tensor, which depend only on seed and name. Buffers have the values that the class
        computes."""
        tensor = self._tensors[spec.name]
        if not tensor.is_meta:
            return tensor
        seed = _tensor_seed(self._seed, spec.name)
        std, own_values = self._recipe(self._origins[spec.name], seed)
        if own_values is None:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.empty(spec.shape, dtype=spec.dtype)
            chunk = torch.empty(min(_CHUNK_ELEMENTS, spec.num_elements))
            for part in drawn.view(-1).split(_CHUNK_ELEMENTS):
                part.copy_(chunk[: part.numel()].normal_(0.0, std, generator=generator))
            return drawn
        repeats = -(-spec.num_elements // own_values.numel())
        return own_values.flatten().repeat(repeats)[: spec.num_elements].view(spec.shape).to(spec.dtype)

    def standard_deviation(self, spec: TensorSpec) -> float | None:
        """The standard deviation, if the tensor is drawn from a normal distribution around zero; else None."""
        if not self._tensors[spec.name].is_meta:
            return None
        std, own_values = self._recipe(self._origins[spec.name], _tensor_seed(self._seed, spec.name))
        return std if own_values is None else None

    def _recipe(self, name: str, seed: int) -> tuple[float, torch.Tensor | None]:
        """Returns (standard deviation, None) if a parameter is drawn from a normal distribution, else (0, values)."""
        module_name, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(module_name)
        parameter = module.get_parameter(leaf)
        if parameter.ndim >= 2 and (std := self._matrix_std(module, parameter)) is not None:
            return std, None
        if parameter.ndim >= 2 and parameter.numel() > _PROBED_ELEMENTS:
            return _fan_in_std(module, parameter), None
        values = _own_initial_values(self._model, module_name, leaf, seed)
        if "bias" in leaf and not values.any():
            return _BIAS_STD, None
        if parameter.ndim >= 2:
            # Initial values that are constant or have a mean near zero are replaced: draw them like a matrix.
            std, mean = torch.std_mean(values)
            is_centered = bool(std == 0) or bool(mean.abs() < 4 * std * values.numel() ** -0.5)
            return (_fan_in_std(module, parameter), None) if is_centered else (0.0, values)
        # A weight of ones, or of zeros (`1 + weight`), is that of a norm.
        if leaf == "weight" and bool((values == values[0]).all()) and values[0].item() in (0.0, 1.0):
            return 0.0, _norm_weight(values, _GAIN if _HEAD_NORM.search(module_name) else 1.0, seed)
        return 0.0, values

    def _matrix_std(self, module: nn.Module, weight: nn.Parameter) -> float | None:
        """The standard deviation of an embedding, head, linear or convolution weight; None for other modules."""
        if isinstance(module, nn.Embedding):
            # Position embeddings get the scale of token embeddings, so that greedy decoding does not run in cycles.
            if not self._has_tied_head:
                return _EMBEDDING_STD
            is_scaled = getattr(self._model.config, "scale_decoder_outputs", False)  # T5 applies the factor itself
            return _TIED_LOGITS_STD * (1.0 if is_scaled else weight.shape[-1] ** -0.5)
        if module is self._model.get_output_embeddings():
            return _HEAD_LOGITS_STD * weight.shape[-1] ** -0.5
        if isinstance(module, (nn.Linear, Conv1D, nn.Conv1d)):
            return _fan_in_std(module, weight)
        return None


def _fan_in_std(module: nn.Module, weight: nn.Parameter) -> float:
    """Returns _GAIN / sqrt(number of input features)."""
    if isinstance(module, Conv1D):  # GPT-2's linear layer, stored (in, out)
        fan_in = weight.shape[0]
    elif isinstance(module, nn.Conv1d):
        fan_in = math.prod(weight.shape[1:])
    else:  # (..., out, in), except for transposed experts
        fan_in = weight.shape[-2] if getattr(module, "is_transposed", False) else weight.shape[-1]
    return _GAIN * fan_in**-0.5


def _own_initial_values(model: PreTrainedModel, module_name: str, leaf: str, seed: int) -> torch.Tensor:
    """Computes the values that the class gives a parameter at initialization, in float32. If it gives none, weights are
    one and other parameters zero."""
    shared = {id(config): config for config in (model.config, model.config.get_text_config())}
    replica = copy.deepcopy(model.get_submodule(module_name), shared)
    owner, prefix = model, ""  # the innermost PreTrainedModel: its `_init_weights` applies
    for part in module_name.split("."):
        prefix = f"{prefix}.{part}".lstrip(".")
        module = model.get_submodule(prefix)
        owner = module if isinstance(module, PreTrainedModel) else owner
    for other in replica.parameters():
        setattr(other, "_is_hf_initialized", True)  # noqa: B010 - transformers then skips it: it is on the meta device
    values = torch.full(replica.get_parameter(leaf).shape, torch.nan)
    setattr(replica, leaf, nn.Parameter(values, requires_grad=False))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed all accelerators
        owner._init_weights(replica)
    values = replica.get_parameter(leaf).detach()
    return values.nan_to_num(nan=1.0 if leaf == "weight" else 0.0)


def _norm_weight(values: torch.Tensor, gain: float, seed: int) -> torch.Tensor:
    """Returns a norm's weight that multiplies features by gain or -gain, at random. `values`: the class's initial
    values; if they are 0, the class multiplies by `1 + weight`. Without the random signs, a model with a tied head
    would generate the last token again."""
    generator = torch.Generator().manual_seed(seed)
    signs = 1.0 - 2.0 * torch.randint(2, values.shape, generator=generator)
    return gain * signs - (1.0 - values)


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
