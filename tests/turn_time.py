"""What a lane's turn through a layer takes of Weightstream's own Python in a pass that decodes, where all weights stay
on the device: the real engine on the double.

    python -m tests.turn_time [families]

prints the microseconds of a turn, which is what a layer more costs a pass of one lane, and those of a pass beside its
turns; then the functions that take most of a turn. Of all passes the fastest counts, as others share the processor.

Counted is what cProfile tells of functions in `runtime/`, with the built-in and standard functions that they call. What
transformers, torch and the double take is not, nor what torch's operators do, but for those that Python spells as
symbols (`a + b`, `a[b]`), which a profile does not see. What profiling takes for each call is measured beside and
left out of the sums, not of the list.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from cProfile import Profile
from dataclasses import dataclass
from pathlib import Path
from pstats import Stats
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from runtime import KVConfig, ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.attention import device_attention as flash_attention
from runtime.config.settings import DType, KVTier, PolicyKind, Tier
from runtime.engine.records import PassRecord, Phase
from tests.attention_doubles import install_flash
from tests.device_operators import operators_of_a_device
from tests.fake_device import FakeDevice
from tests.support import synthesize

ROOT = str(Path(__file__).resolve().parents[1])
FEW_LAYERS, MANY_LAYERS = 4, 24
NUM_ROWS, NUM_NEW_TOKENS = 8, 32
REPEATS = 3
NUM_CALLS = 2000
FAMILIES = ("llama", "qwen3", "mixtral")
MOST_SHOWN = 24
Function = tuple[str, int, str]  # as cProfile names it: file, line, name


@dataclass(frozen=True)
class Cost:
    """Of our own code, with what it takes to profile it."""

    seconds: float = 0.0
    calls: float = 0.0


def own_costs(profile: Profile) -> dict[Function, Cost]:
    """Those of each function in `runtime/`, and of what these call that is neither torch's nor a model's."""
    stats: dict[Function, Any] = Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    shares = {function: float(_is_ours(function)) for function in stats}
    for _ in range(4):  # as deep as standard functions call each other
        for function, (_, calls, *_, callers) in stats.items():
            if not _is_ours(function) and not _is_foreign(function):
                shares[function] = sum(of[1] * shares.get(caller, 0.0) for caller, of in callers.items()) / calls
    return {
        function: Cost(own * shares[function], calls * shares[function])
        for function, (_, calls, own, *_) in stats.items()
        if shares[function]
    }


def _is_ours(function: Function) -> bool:
    return function[0].startswith(f"{ROOT}/runtime/")


def _is_foreign(function: Function) -> bool:
    file, _, name = function
    return any(word in f"{file} {name}" for word in ("site-packages", "torch", "TensorBase", "/tests/"))


def costs_of_a_pass(home: Path) -> dict[Function, Cost]:
    """By function, in the fastest pass that decodes but the first and the last, which make and drop what others keep.
    `home` has a checkpoint in bfloat16."""
    config = RuntimeConfig(
        model=ModelConfig(name="test", path=str(home), dtype=DType.bfloat16),
        offload=OffloadConfig(tier=Tier.none),
        kv=KVConfig(tier=KVTier.device),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=NUM_ROWS, num_micro_batches=1),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
    )
    samples, profile = list[dict[Function, Cost]](), Profile()

    def on_pass(record: PassRecord) -> None:
        nonlocal profile
        profile.disable()
        if record.phase is Phase.decode:
            samples.append(own_costs(profile))
        profile = Profile()
        profile.enable()

    with operators_of_a_device():
        runtime = Runtime(config, device=FakeDevice((False, False)))
        requests = [runtime.request(str(i), list(range(5, 25 + i))) for i in range(NUM_ROWS)]
        with runtime.open_with_backoff(requests) as (plan, session):
            for block in plan.blocks:
                session.run(block, requests, on_pass)
        profile.disable()
    fewest = min(total(costs).calls for costs in samples[1:-1])
    alike = (costs for costs in samples[1:-1] if total(costs).calls < fewest + 0.5)  # in which no sequence takes a page
    return min(alike, key=lambda costs: total(costs).seconds)


def profiling_seconds() -> float:
    """What a profile adds to a call, now."""

    def called() -> None: ...

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(NUM_CALLS):
            called()
        return time.perf_counter() - begin

    profile = Profile()
    plain = min(seconds() for _ in range(5))
    profile.enable()
    profiled = min(seconds() for _ in range(5))
    profile.disable()
    return max(0.0, profiled - plain) / NUM_CALLS


def total(costs: Mapping[Function, Cost]) -> Cost:
    return Cost(sum(cost.seconds for cost in costs.values()), sum(cost.calls for cost in costs.values()))


def turn_and_pass(family: str, home: Path, repeats: int = REPEATS) -> tuple[dict[Function, Cost], dict[Function, Cost]]:
    """By function: what a layer more costs a pass, and what a pass costs beside its layers. How often a function is
    called by either is exact; a call takes as long in one as in the other."""
    few, many = (
        min((costs_of_a_pass(place) for _ in range(repeats)), key=lambda costs: total(costs).seconds)
        for count in (FEW_LAYERS, MANY_LAYERS)
        for place in [synthesize(family, home / f"{family}-{count}", num_hidden_layers=count)]
    )
    turn, beside, num = dict[Function, Cost](), dict[Function, Cost](), MANY_LAYERS - FEW_LAYERS
    for function, cost in many.items():
        before = few.get(function, Cost())
        calls = (cost.calls - before.calls) / num
        grown = cost.seconds * calls / cost.calls
        if not calls and _is_ours(function):  # a loop over all turns
            grown = (cost.seconds - before.seconds) / num
        turn[function] = Cost(grown, calls)
        beside[function] = Cost(cost.seconds - MANY_LAYERS * grown, cost.calls - MANY_LAYERS * calls)
    return turn, beside


def attend_at_once(patch: pytest.MonkeyPatch) -> None:
    """From now on there are flash kernels, which take no time and give the queries back."""
    install_flash(patch)
    patch.setattr(flash_attention, "flash_operator", lambda: lambda query, *args, **kwargs: (query, query))


def called_functions(costs: Mapping[Function, Cost]) -> float:
    """How often functions of `runtime/` are called."""
    return sum(cost.calls for function, cost in costs.items() if _is_ours(function))


def show(families: Sequence[str]) -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as home:
        attend_at_once(patch)
        for family in families:
            turn, beside = turn_and_pass(family, Path(home))
            sums = total(turn), total(beside)
            calls, added = [each.calls for each in sums], profiling_seconds()
            us = [(each.seconds - each.calls * added) * 1e6 for each in sums]
            print(f"{family}: a turn {us[0]:.0f} us in {calls[0]:.0f} calls, a pass {us[1]:.0f} us in {calls[1]:.0f}")
            whole = sums[0].seconds * 1e6
            print(f"  {whole:.0f} us of the turn with what profiling takes, {added * 1e6:.2f} us a call")
            for (file, line, name), cost in sorted(turn.items(), key=lambda each: -each[1].seconds)[:MOST_SHOWN]:
                place = f"{file.removeprefix(ROOT + '/')}:{line} {name}"
                print(f"  {cost.seconds * 1e6:6.2f} us  {cost.calls:5.2f} calls  {place}")


if __name__ == "__main__":
    show(sys.argv[1:] or FAMILIES)
