"""The table of published numbers beside predicted ones, and which assumption each large deviation comes from.

    python -m tests.deviations    prints it, Markdown, as conf/machine/README.md shows it
    python -m tests.deviations "l4, MTBench 64"

A deviation is explained by computing: one assumption at a time is given up, and the ratio without it is printed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from runtime.plan.layer_work import LayerWork
from runtime.plan.policy import Policy
from runtime.plan.rates import MachineRates
from tests.published import Setting, choose, machine_for, predicted, published_policy, settings

LARGE = 1.5
NOTABLE = 0.03  # change of a ratio that is worth a word

Change = Callable[[MachineRates], MachineRates]


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """`change` is how fast the machine would be without it; `slow_prefill`: prompts at the rate that `implied` finds."""

    name: str
    change: Change = lambda rates: rates
    slow_prefill: bool = False

    def tokens_per_second(self, setting: Setting, policy: Policy) -> float:
        """Without the assumption, in one block of the policy."""
        found = predicted(setting, policy, self.change(machine_for(setting).rates))
        prefill = found.prefill_seconds
        if self.slow_prefill:
            prefill = max(prefill, policy.num_sequences * implied_prefill_seconds(setting))
        return policy.num_sequences * setting.workload.max_new_tokens / (prefill + found.decode_seconds)


def half_link(rates: MachineRates) -> MachineRates:
    return replace(rates, link_in_bytes_per_second=rates.link_in_bytes_per_second / 2)


def no_exchange(rates: MachineRates) -> MachineRates:
    return replace(rates, collective_bytes_per_second=float("inf"), collective_seconds=0.0)


AS_ASSUMED = Assumption(name="as assumed")
ASSUMPTIONS = (
    Assumption(name="prefill as slow as their rows imply", slow_prefill=True),
    Assumption(name="half the link", change=half_link),
    Assumption(name="both", change=half_link, slow_prefill=True),
    Assumption(name="no all-reduce", change=no_exchange),
)


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
    """Of the products of one prompt."""
    work = LayerWork.of(setting.shape)
    return setting.workload.mean_prompt_tokens * work.num_layers * work.flops_per_token


def implied_prefill_seconds(setting: Setting) -> float:
    """Of one prompt, at the FLOP/s that rows of this card imply, on as many as the setting has."""
    card = "t4" if setting.machine == "4xt4" else setting.machine
    rate = implied(card).flops_per_second * machine_for(setting).num_devices
    return prompt_flops(setting) / rate


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
        return not 1 / LARGE <= self.ratio <= LARGE

    def without(self) -> Iterator[tuple[str, float]]:
        """Names of assumptions, and the ratio without each. What changes nothing is left out."""
        usual = AS_ASSUMED.tokens_per_second(self.setting, self.policy)
        for each in ASSUMPTIONS:
            change = each.tokens_per_second(self.setting, self.policy) / usual
            if abs(change - 1) > NOTABLE:
                yield each.name, self.ratio * change

    def explained(self) -> str:
        return ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.without()) if self.is_large else ""


def with_theirs(setting: Setting) -> Compared | None:
    policy = published_policy(setting)
    if policy is None:
        return None
    return Compared(setting=setting, policy=policy, tokens_per_second=AS_ASSUMED.tokens_per_second(setting, policy))


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
    "| predicted for it | ratio | ratio without an assumption |\n|---|---|---|---|---|---|---|---|---|---|---|"
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
