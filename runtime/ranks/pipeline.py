"""Pipeline parallelism: each rank computes consecutive stages of the model (embeddings, one layer, or norm and head).

Every rank runs the model class's own forward. Before the rank's stages, embeddings are zeros and layers return their
input. The rank's first layer gets the hidden states that the previous rank sent. The forward ends at the next rank's
first layer.

This requires that each layer passes only its hidden states to the next layer. A test run without weights checks this,
and finds the argument of a layer that contains the hidden states: it tracks the origins of each tensor, which are the
layers that it was computed from.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import DynamicCache, PreTrainedModel

from ..errors import ConfigError
from ..events import Weights, current_lane_run
from ..model.stages import EMBEDDING, StagedModel, StreamedModule, empty_weights
from ..probing.empty_weights import copy_on_meta, copy_with_random_values
from ..probing.layer_lists import layer_lists
from ..probing.padded_probe import cache_argument

NUM_TOKENS = 2
OUTER_WEIGHTS = -1  # the origin of tensors computed from weights outside the layers; other origins are layer indices
# Operations whose results do not depend on the values of their arguments.
_FACTORIES = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full", "rand", "randn")


@dataclass(frozen=True, kw_only=True)
class LayerSignature:
    """Calling convention of a decoder layer. `argument`: position or keyword of the hidden states. `num_outputs`:
    length of the returned tuple, which begins with the hidden states; 0: the layer returns a tensor."""

    argument: int | str
    num_outputs: int

    def hidden_states(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        return args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]

    def with_hidden_states(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], hidden: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with `hidden` as hidden states."""
        if isinstance(self.argument, int):
            return (*args[: self.argument], hidden, *args[self.argument + 1 :]), dict(kwargs)
        return tuple(args), {**kwargs, self.argument: hidden}

    def make_outputs(self, hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Return value of a layer with the hidden states `hidden` as its result."""
        return (hidden, *[None] * (self.num_outputs - 1)) if self.num_outputs else hidden


def layer_signatures(model: PreTrainedModel) -> tuple[LayerSignature, ...]:
    """Finds the signature of each decoder layer. `model` must have all layers, with parameters on the meta device.
    Raises ConfigError if a layer needs more than the hidden states of the previous layer."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0):
        raise _error(model, "layers share keys and values (num_kv_shared_layers)")
    try:
        return _probe(model, copy_on_meta(model), "meta")
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, IndexError):
        return _probe(model, copy_with_random_values(model, num_layers=None), "cpu")


def _probe(model: PreTrainedModel, copy: PreTrainedModel, device: str) -> tuple[LayerSignature, ...]:
    """Runs `copy`, a copy of `model` without weights, and returns the signatures."""
    tracker = _OriginTracker(copy.parameters())
    [layers] = layer_lists(copy)
    calls = [_LayerCall(tracker, index) for index in range(len(layers.layers))]
    for layer, call in zip(layers.layers, calls, strict=True):
        layer.register_forward_pre_hook(call.enter, with_kwargs=True)
        layer.register_forward_hook(call.leave)
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device=device)
    cache = {cache_argument(copy): DynamicCache(config=copy.config)}
    with torch.inference_mode(), tracker:
        copy(input_ids=ids, use_cache=True, **cache)
    signatures = list[LayerSignature]()
    for call in calls:
        before = call.index - 1 if call.index else OUTER_WEIGHTS
        if list(call.argument_origins.values()) != [frozenset({before})] or not call.is_tensor:
            inputs = ", ".join(f"{name} from {sorted(found)}" for name, found in call.argument_origins.items())
            raise _error(model, f"layer {call.index} needs more than the hidden states of the layer before: {inputs}")
        signatures.append(LayerSignature(argument=next(iter(call.argument_origins)), num_outputs=call.num_outputs))
    return tuple(signatures)


class _OriginTracker(TorchDispatchMode):
    """A torch mode that tracks the origins of each tensor. A tensor without origins, such as one computed from
    positions, is equal on all ranks."""

    def __init__(self, weights: Iterator[torch.nn.Parameter]):
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}
        for weight in weights:
            self.mark(weight, frozenset({OUTER_WEIGHTS}))

    def mark(self, tensor: torch.Tensor, origins: frozenset[int]) -> None:
        self._known[id(tensor)] = tensor, origins  # the reference prevents that another tensor gets the same id

    def origins_of(self, tensor: torch.Tensor) -> frozenset[int]:
        return self._known[id(tensor)][1] if id(tensor) in self._known else frozenset()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.removesuffix("_like") in _FACTORIES:
            return out
        origins = frozenset[int]().union(*(self.origins_of(each) for each in _tensors((args, kwargs))))
        if origins:
            for each in _tensors(out):
                self.mark(each, origins | self.origins_of(each))
        return out


def _tensors(values: object) -> Iterator[torch.Tensor]:
    return (each for each in tree_iter(values) if isinstance(each, torch.Tensor))


@dataclass
class _LayerCall:
    """Record of one layer's call in the test run. `argument_origins`: argument -> its origins, without arguments that
    have none. `is_tensor`: the last of them is a tensor."""

    tracker: _OriginTracker
    index: int
    argument_origins: dict[int | str, frozenset[int]] = field(default_factory=dict)
    is_tensor: bool = False
    num_outputs: int = 0

    def enter(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for argument, value in [*enumerate(args), *kwargs.items()]:
            origins = frozenset[int]().union(*map(self.tracker.origins_of, _tensors(value)))
            if origins:
                self.argument_origins[argument] = origins
                self.is_tensor = isinstance(value, torch.Tensor)

    def leave(self, layer: torch.nn.Module, args: tuple[Any, ...], out: Any) -> None:
        for tensor in _tensors(out):
            self.tracker.mark(tensor, frozenset({self.index}))  # replaces earlier origins
        self.num_outputs = len(out) if isinstance(out, tuple) else 0


def _error(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"devices=pipeline: the layers of {type(model).__name__} cannot be split among ranks: {why}; set "
        "devices=sharded or devices=one"
    )


class _LocalStagesDone(Exception):
    """Ends the forward before the next rank's first layer. The lane's `hidden_out` is then sent to that rank."""


def keep_stages(staged: StagedModel, part: range, layers: Sequence[LayerSignature], device: torch.device) -> None:
    """Makes the model compute only the stages in `part`; it must then be run with `run_local_stages`. `layers`:
    signatures of the decoder layers, which are stages from 1 on. Mutates the model's modules."""
    for module in staged.modules:
        signature = layers[module.stage - 1] if 0 < module.stage <= len(layers) else None
        if module.stage == EMBEDDING and EMBEDDING not in part:
            module.weights_override = partial(_placeholder_weights, module, empty_weights(staged, EMBEDDING, device))
        elif signature is None:
            continue
        elif module.stage < part.start:
            module.forward_override = partial(_skip_layer, signature)
        elif module.stage == part.start > EMBEDDING:
            module.forward_override = partial(_run_first_layer, module, signature)
        elif module.stage == part.stop:
            module.forward_override = partial(_end_local_stages, signature)


def run_local_stages(forward: Callable[[], object]) -> None:
    """Runs the model's forward up to the end of this rank's stages."""
    with suppress(_LocalStagesDone):
        forward()


def _placeholder_weights(module: StreamedModule, weights: Weights) -> Weights:
    """Returns placeholder embeddings, for ranks other than 0. Raises ConfigError if the embeddings are used after this
    rank's first layer has begun, when the values matter."""
    if current_lane_run().hidden_in is not None:
        raise ConfigError(
            f"devices=pipeline: {module.name} is used after the first layer, but only rank 0 has it: set "
            "devices=sharded or devices=one"
        )
    return weights


def _skip_layer(signature: LayerSignature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return signature.make_outputs(signature.hidden_states(args, kwargs))


def _run_first_layer(
    module: StreamedModule, signature: LayerSignature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Runs the layer on a buffer that receives the previous rank's hidden states."""
    run = current_lane_run()
    # The engine fills this buffer before the layer gets its weights, and so before the layer computes.
    run.hidden_in = torch.empty_like(signature.hidden_states(args, kwargs), memory_format=torch.contiguous_format)
    return module.run_inner(*signature.with_hidden_states(args, kwargs, run.hidden_in))


def _end_local_stages(signature: LayerSignature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    current_lane_run().hidden_out = signature.hidden_states(args, kwargs).contiguous()
    raise _LocalStagesDone
