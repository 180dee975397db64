"""A model of which this process computes some stages, that follow one another, and other ranks the rest.

The class's own forward runs in every rank. In front of the rank's stages embeddings are zeros of the right shape, and
layers hand on what they are given; at the first of its layers hidden states take their place that the rank before has
sent; and where the next rank's layers begin, the forward ends.

That takes a class whose layers are handed one tensor by the layers before them. Which it is, is found by following, in
a run without weights, what each tensor was made of.
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
OUTER_WEIGHTS = -1  # where a number comes from: a weight outside of all layers, or the layer of that index
ALTERNATIVES = "only the first rank of devices=pipeline has it: take devices=sharded, or devices=one"
_FACTORIES = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros", "new_ones", "new_full", "rand", "randn")


@dataclass(frozen=True, kw_only=True)
class LayerSignature:
    """How a layer is called and what it returns: `place` of the hidden states among its arguments, a number or a name,
    and how many things it gives, the hidden states first; 0: them alone, in no tuple."""

    argument: int | str
    num_outputs: int

    def hidden_states(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The hidden states among the arguments of a call."""
        return args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]

    def with_hidden_states(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], hidden: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other hidden states."""
        if isinstance(self.argument, int):
            return (*args[: self.argument], hidden, *args[self.argument + 1 :]), dict(kwargs)
        return tuple(args), {**kwargs, self.argument: hidden}

    def make_outputs(self, hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """What a layer returns that leaves its hidden states as they are."""
        return (hidden, *[None] * (self.num_outputs - 1)) if self.num_outputs else hidden


def layer_signatures(model: PreTrainedModel) -> tuple[LayerSignature, ...]:
    """How hidden states come into each decoder layer. `model` must be whole, with parameters on the meta device,
    and is not changed. Raises ConfigError where a layer needs more of those before it, by name."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", 0):
        raise _error(model, "some of its layers attend to keys and values of others (num_kv_shared_layers)")
    try:
        return _probe(model, copy_on_meta(model), "meta")
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, IndexError):
        return _probe(model, copy_with_random_values(model, num_layers=None), "cpu")


def _probe(model: PreTrainedModel, copy: PreTrainedModel, device: str) -> tuple[LayerSignature, ...]:
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
            what = ", ".join(f"{place} of {sorted(origins)}" for place, origins in call.argument_origins.items())
            raise _error(model, f"layer {call.index} is handed more than the hidden states of the one before: {what}")
        signatures.append(LayerSignature(argument=next(iter(call.argument_origins)), num_outputs=call.num_outputs))
    return tuple(signatures)


class _OriginTracker(TorchDispatchMode):
    """Says of tensors where their numbers come from; `of` gives nothing where they are the same in every process."""

    def __init__(self, weights: Iterator[torch.nn.Parameter]):
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}
        for weight in weights:
            self.mark(weight, frozenset({OUTER_WEIGHTS}))

    def mark(self, tensor: torch.Tensor, origins: frozenset[int]) -> None:
        self._known[id(tensor)] = tensor, origins  # held, so that no other gets its id

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
    """One layer in the run: from where came what no other process has, by its place, and what it gave."""

    tracker: _OriginTracker
    index: int
    argument_origins: dict[int | str, frozenset[int]] = field(default_factory=dict)
    is_tensor: bool = False
    num_outputs: int = 0

    def enter(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, value in [*enumerate(args), *kwargs.items()]:
            origins = frozenset[int]().union(*map(self.tracker.origins_of, _tensors(value)))
            if origins:
                self.argument_origins[place] = origins
                self.is_tensor = isinstance(value, torch.Tensor)

    def leave(self, layer: torch.nn.Module, args: tuple[Any, ...], out: Any) -> None:
        for each in _tensors(out):
            self.tracker.mark(each, frozenset({self.index}))
        self.num_outputs = len(out) if isinstance(out, tuple) else 0


def _error(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"devices=pipeline: the layers of {type(model).__name__} cannot be divided among ranks: {why}; take "
        "devices=sharded, or devices=one"
    )


class _LocalStagesDone(Exception):
    """The next layer is another rank's, which is handed what is in the run's `leaving`."""


def keep_stages(staged: StagedModel, part: range, layers: Sequence[LayerSignature], device: torch.device) -> None:
    """Mutates the model: of its stages only those of `part` ask for weights from now on, and a run of
    `until_it_leaves` ends behind them. `layers` as `handed_on` gives them, of decoder layers from stage 1 on;
    on `device`."""
    for module in staged.modules:
        signature = layers[module.stage - 1] if 0 < module.stage <= len(layers) else None
        if module.stage == EMBEDDING and EMBEDDING not in part:
            module.stand_in = partial(_placeholder_weights, module, empty_weights(staged, EMBEDDING, device))
        elif signature is None:
            continue
        elif module.stage < part.start:
            module.instead = partial(_skip_layer, signature)
        elif module.stage == part.start > EMBEDDING:
            module.instead = partial(_run_first_layer, module, signature)
        elif module.stage == part.stop:
            module.instead = partial(_end_local_stages, signature)


def run_local_stages(forward: Callable[[], object]) -> None:
    """Runs it up to where another rank goes on, or to its end."""
    with suppress(_LocalStagesDone):
        forward()


def _placeholder_weights(module: StreamedModule, weights: Weights) -> Weights:
    """Raises ConfigError where what is made of them would not be replaced by what the rank before sends."""
    if current_lane_run().hidden_in is not None:
        raise ConfigError(f"model.path: {module.name} is asked for behind the first layer, and {ALTERNATIVES}")
    return weights


def _skip_layer(signature: LayerSignature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return signature.make_outputs(signature.hidden_states(args, kwargs))


def _run_first_layer(
    module: StreamedModule, signature: LayerSignature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Runs the layer on memory that is filled before the lane gets the layer's weights."""
    run = current_lane_run()
    run.hidden_in = torch.empty_like(signature.hidden_states(args, kwargs), memory_format=torch.contiguous_format)
    return module.run_inner(*signature.with_hidden_states(args, kwargs, run.hidden_in))


def _end_local_stages(signature: LayerSignature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    current_lane_run().hidden_out = signature.hidden_states(args, kwargs).contiguous()
    raise _LocalStagesDone
