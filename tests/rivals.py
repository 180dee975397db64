"""What others published of runs that offload, beside what `jobs.plan` says of the same load on the nearest profile.

python -m tests.rivals    prints the table of docs/project/benchmarks-predictions.md, Markdown, in half a minute
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir

from jobs.config.settings import load
from jobs.planning.config import PlanConfig
from jobs.planning.planning import make_plan

CONF = Path(__file__).resolve().parents[1] / "conf"


@dataclass(frozen=True, kw_only=True)
class Rival:
    """`published`: generated tokens/s; `settings`: of `jobs.plan`, for the same load or, where `load` says so, another
    one, of which no ratio is printed."""

    name: str
    machine: str
    model: str
    published: float
    settings: str
    load: str = "the same"

    @property
    def row(self) -> str:
        found = planned(self.settings)
        ratio = f"{found / self.published:.2f}" if self.load == "the same" else ""
        published, ours = f"{self.published:.4g}", f"{found:.4g}"
        cells = [self.name, self.machine, self.model, published, ours, self.load, ratio, f"`{self.settings}`"]
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| who | on | model | published | our plan | its load | plan / published | `python -m jobs.plan ...` |\n"
    "|---|---|---|---|---|---|---|---|"
)
OPT = "machine=t4 machine.sheet.host_memory_gib=208 model=opt-30b offload=cpu sampling.max_new_tokens=32"
PADDED = "workload.mean_prompt_tokens=512 workload.max_prompt_tokens=512"
OSS = "model=gpt-oss-120b sampling.max_new_tokens=128"


def rivals() -> Iterator[Rival]:
    for card, tokens in (("t4", 97.7), ("l4", 217.5)):
        yield Rival(
            name="MoE-Lightning (Cao et al. 2025), MTBench 128",
            machine=f"{card.upper()}, 192 GB",
            model="Mixtral 8x7B, fp16",
            published=tokens,
            settings=f"machine={card} model=mixtral offload=cpu sampling.max_new_tokens=128",
        )
    for system, tokens, count in (("FlexGen", 7.32, 144), ("accelerate", 0.62, 8), ("ZeRO-Inference", 0.60, 4)):
        yield Rival(
            name=f"{system}, in FlexGen's README, {count} at once",
            machine="T4, 208 GB",
            model="OPT-30B, fp16",
            published=tokens,
            settings=f"{OPT} {PADDED} workload.num_requests={count}",
        )
    yield Rival(
        name="FlexGen with 4 bits, the same, 512 at once",
        machine="T4, 208 GB",
        model="OPT-30B, int4",
        published=8.38,
        settings=f"{OPT} {PADDED} workload.num_requests=512 plan.format=int4",
    )
    for count in (1, 256):
        load = "1 prompt of 77 tokens" if count == 1 else f"{count} prompts"
        yield Rival(
            name="llama.cpp, `--n-cpu-moe 36` (gokawiil.com/article/74814), one stream",
            machine="8 GB of a card, i9-14900K, 96 GB",
            model="gpt-oss-120b",
            published=25.6,
            settings=f"machine=rtx4060 machine.sheet.host_memory_gib=96 {OSS} workload.num_requests={count}",
            load=load,
        )
        yield Rival(
            name="llama.cpp, `--n-cpu-moe 27` (hardware-corner.net), one stream",
            machine="RTX 3090, EPYC 7343, 64 GB",
            model="gpt-oss-120b",
            published=1.6,
            settings=f"machine=rtx3090 {OSS} workload.num_requests={count}",
            load=load,
        )


def planned(settings: str) -> float:
    """Generated tokens/s over prefill and decode."""
    with initialize_config_dir(str(CONF), version_base=None):
        config = load(PlanConfig, compose("plan", overrides=settings.split()))
    found = make_plan(config).throughput[2]
    assert found is not None, "every plan here generates"
    return found


def main() -> None:
    print(HEADER)
    for rival in rivals():
        print(rival.row, flush=True)


if __name__ == "__main__":
    main()
