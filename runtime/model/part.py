"""A model of which this process computes some stages, that follow one another, and other ranks the rest.

The class's own forward runs in every rank. In front of the rank's stages embeddings are zeros of the right shape, and
layers hand on what they are given; at the first of its layers hidden states take their place that the rank before has
sent; and where the next rank's layers begin, the forward ends.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent

from ..errors import ConfigError
from ..events import LaneRun, Weights
from ..probing.layer_inputs import HandedOn
from .stages import EMBEDDING, StagedModel, StreamedModule, hollow_weights

OTHER_WAYS = "only the first rank of devices=pipeline has it: take devices=sharded, or devices=one"


class _LeftRank(Exception):
    """The next layer is another rank's, which is handed what is in the run's `leaving`."""


def keep_part(staged: StagedModel, part: range, layers: Sequence[HandedOn], device: torch.device) -> None:
    """Mutates the model: of its stages only those of `part` ask for weights from now on, and a run of
    `until_it_leaves` ends behind them. `layers` as `handed_on` gives them, of decoder layers from stage 1 on;
    on `device`."""
    for module in staged.modules:
        handed = layers[module.stage - 1] if 0 < module.stage <= len(layers) else None
        if module.stage == EMBEDDING and EMBEDDING not in part:
            module.stand_in = partial(_hollow, module, hollow_weights(staged, EMBEDDING, device))
        elif handed is None:
            continue
        elif module.stage < part.start:
            module.instead = partial(_passed_over, handed)
        elif module.stage == part.start > EMBEDDING:
            module.instead = partial(_entered, module, handed)
        elif module.stage == part.stop:
            module.instead = partial(_left, handed)


def until_it_leaves(forward: Callable[[], object]) -> None:
    """Runs it up to where another rank goes on, or to its end."""
    with suppress(_LeftRank):
        forward()


def _hollow(module: StreamedModule, weights: Weights) -> Weights:
    """Raises ConfigError where what is made of them would not be replaced by what the rank before sends."""
    if _run().entering is not None:
        raise ConfigError(f"model.path: {module.name} is asked for behind the first layer, and {OTHER_WAYS}")
    return weights


def _passed_over(handed: HandedOn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return handed.given(handed.taken(args, kwargs))


def _entered(module: StreamedModule, handed: HandedOn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Runs the layer on memory that is filled before the lane gets the layer's weights."""
    run = _run()
    run.entering = torch.empty_like(handed.taken(args, kwargs), memory_format=torch.contiguous_format)
    return module.computed(*handed.replaced(args, kwargs, run.entering))


def _left(handed: HandedOn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    _run().leaving = handed.taken(args, kwargs).contiguous()
    raise _LeftRank


def _run() -> LaneRun:
    run = getcurrent()
    assert isinstance(run, LaneRun), "a part of a model runs in lanes alone"
    return run
