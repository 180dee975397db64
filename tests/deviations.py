"""The table of published numbers beside predicted ones, and which assumption each large deviation comes from.

    python -m tests.deviations    prints it, Markdown, as docs/project/benchmarks-moe-lightning.md shows it
    python -m tests.deviations "l4, MTBench 64"

A deviation is explained by computing: one assumption at a time is given up, and the ratio without it is printed.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations

from runtime.config.settings import Attention, Order
from runtime.plan.cost.rates import UNLIMITED, MachineRates
from runtime.plan.cost.work import LayerWork
from runtime.plan.search.policy import Policy
from tests.published import Setting, choose, machine_for, predicted, published_policy, settings

LARGE = 1.5
SMALL_LANE = 164  # sequences, of most policies that were published
NOTABLE = 0.03  # change of a ratio that is worth a word


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """What is not as a prediction assumes. `slow_prefill`: prompts take what `implied` finds; `half_link`: weights come
    in at half the rate; `cgopipe`: the same block in their order; `no_exchange`: devices add up for nothing;
    `small_lanes`: as many sequences in micro-batches of the size that was published for that card and length."""

    slow_prefill: bool = False
    half_link: bool = False
    cgopipe: bool = False
    no_exchange: bool = False
    small_lanes: bool = False

    @property
    def name(self) -> str:
        return " and ".join(each.name.replace("_", " ") for each in fields(self) if getattr(self, each.name))

    def tokens_per_second(self, setting: Setting, policy: Policy) -> float:
        """In one block of the policy."""
        changed = self.policy(policy, _published_lane(setting))
        prediction = predicted(setting, changed, self.rates(machine_for(setting).rates))
        prefill = prediction.prefill_seconds
        if self.slow_prefill:
            prefill = max(prefill, policy.num_sequences * implied_prefill_seconds(setting))
        return policy.num_sequences * setting.workload.max_new_tokens / (prefill + prediction.decode_seconds)

    def policy(self, policy: Policy, small_lane: int) -> Policy:
        if self.cgopipe and policy.attention is Attention.cpu:
            policy = replace(policy, schedule=Order.cgopipe)
        if self.small_lanes and policy.micro_batch_size > small_lane:
            count = -(-policy.num_sequences // small_lane)
            return replace(policy, micro_batch_size=small_lane, num_micro_batches=count)
        return policy

    def rates(self, rates: MachineRates) -> MachineRates:
        if self.half_link:
            rates = replace(rates, link_in_bytes_per_second=rates.link_in_bytes_per_second / 2)
        if self.no_exchange:
            rates = replace(rates, exchange_bytes_per_second=UNLIMITED, exchange_seconds=0.0)
        return rates


def _published_lane(setting: Setting) -> int:
    """Sequences of a micro-batch of the policy that was published for prompts of any kind."""
    of_any = (each.policy for each in settings() if (each.machine, each.task) == (setting.machine, setting.task))
    return next((policy[1] for policy in of_any if policy is not None), SMALL_LANE)


NO_DOUBT = Doubt()
DOUBTS = [each.name for each in fields(Doubt)]


def doubts(count: int) -> list[Doubt]:
    """So many at once."""
    return [Doubt(**dict.fromkeys(names, True)) for names in combinations(DOUBTS, count)]


@dataclass(frozen=True, kw_only=True)
class Implied:
    """Of two published rows that differ in the length of answers: seconds of a prompt and of a decode pass."""

    prompt_seconds: float
    pass_seconds: float
    flops_per_second: float  # of one device, in prefill


@cache
def implied(card: str) -> Implied:
    """N prompts and T - 1 passes take N T / (tokens/s), for the rows of 32 and of 64 tokens: two equations. On T4 both
    rows have the same N; on L4 a pass of either N is taken to last as long."""
    first, second = [each for each in settings() if each.machine == card and each.policy is not None][:2]
    (n1, t1, s1), (n2, t2, s2) = (_sizes(first), _sizes(second))
    pass_seconds = (n1 * s2 - n2 * s1) / (n1 * (t2 - 1) - n2 * (t1 - 1))
    prompt_seconds = (s1 - (t1 - 1) * pass_seconds) / n1
    return Implied(
        prompt_seconds=prompt_seconds,
        pass_seconds=pass_seconds,
        flops_per_second=prompt_flops(first) / prompt_seconds,
    )


def _sizes(setting: Setting) -> tuple[int, int, float]:
    """Sequences, tokens of each, and the seconds of all."""
    policy = published_policy(setting)
    assert policy is not None, f"no policy was published for {setting.name}"
    count, length = policy.num_sequences, setting.workload.max_new_tokens
    return count, length, count * length / setting.moe_lightning


def prompt_flops(setting: Setting) -> float:
    """Of one card's products of one prompt."""
    work = LayerWork.from_shape(setting.shape)
    return setting.workload.mean_prompt_tokens * work.num_layers * work.flops_per_token


def implied_prefill_seconds(setting: Setting) -> float:
    """Of one prompt, at the FLOP/s that rows of this card imply."""
    card = "t4" if setting.machine == "4xt4" else setting.machine
    return prompt_flops(setting) / implied(card).flops_per_second


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A policy's prediction beside the published number."""

    setting: Setting
    policy: Policy
    tokens_per_second: float

    @property
    def ratio(self) -> float:
        return self.tokens_per_second / self.setting.moe_lightning

    @property
    def is_large(self) -> bool:
        return not is_small(self.ratio)

    def without(self) -> Iterator[tuple[str, float]]:
        """Ratios with one doubt, of those that change it; and if that explains nothing, with as many as it takes."""
        usual = NO_DOUBT.tokens_per_second(self.setting, self.policy)
        for count in range(1, len(DOUBTS) + 1):
            found = {
                doubt.name: self.ratio * doubt.tokens_per_second(self.setting, self.policy) / usual
                for doubt in doubts(count)
            }
            explaining = {name: ratio for name, ratio in found.items() if is_small(ratio)}
            notable = {name: ratio for name, ratio in found.items() if abs(ratio / self.ratio - 1) > NOTABLE}
            yield from (notable if count == 1 else explaining).items()
            if explaining:
                return

    def explained(self) -> str:
        return ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.without()) if self.is_large else ""


def is_small(ratio: float) -> bool:
    return 1 / LARGE <= ratio <= LARGE


def with_theirs(setting: Setting) -> Compared | None:
    policy = published_policy(setting)
    if policy is None:
        return None
    return Compared(setting=setting, policy=policy, tokens_per_second=NO_DOUBT.tokens_per_second(setting, policy))


def with_ours(setting: Setting) -> Compared:
    best = choose(setting).best
    return Compared(setting=setting, policy=best.policy, tokens_per_second=best.tokens_per_second)


def row(setting: Setting) -> str:
    theirs, ours = with_theirs(setting), with_ours(setting)
    words = f"{ours.policy.schedule.value}, {ours.policy.attention.value} attends"
    cells = [
        setting.name,
        number(setting.flexgen),
        number(setting.deepspeed),
        number(setting.moe_lightning),
        "" if theirs is None else blocks(theirs.policy),
        *shown(theirs),
        f"{blocks(ours.policy)}, {words}",
        *shown(ours),
        "; ".join(explanations([("theirs", theirs), ("ours", ours)])),
    ]
    return "| " + " | ".join(cells) + " |"


def explanations(compared: Sequence[tuple[str, Compared | None]]) -> Iterator[str]:
    for name, each in compared:
        if each is not None and each.is_large:
            yield f"{name}: {each.explained()}"


def blocks(policy: Policy) -> str:
    return f"{policy.num_micro_batches} x {policy.micro_batch_size}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def shown(compared: Compared | None) -> tuple[str, str]:
    return ("", "") if compared is None else (f"{compared.tokens_per_second:.1f}", f"{compared.ratio:.2f}")


HEADER = (
    "| setting | FlexGen | DeepSpeed | MoE-Lightning | its policy | predicted for it | ratio | our policy "
    "| predicted for it | ratio | ratio where an assumption is wrong |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", default="", help="settings whose name holds this text")
    only = parser.parse_args().only
    print(HEADER)
    for setting in settings():
        if only in setting.name:
            print(row(setting), flush=True)


if __name__ == "__main__":
    main()
