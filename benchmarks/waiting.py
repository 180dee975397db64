"""What helps a run that waits for its disk: several disks, drafts, single rows of embedding tables, and experts that
stay in memory. Each disk is held to a rate, which is stated.

    python -m benchmarks.waiting disks DIR        a synthesized model at DIR from 1, 2 and 4 mirrors
    python -m benchmarks.waiting disks DIR --striped    the same, packed into 1, 2 and 4 directories
    python -m benchmarks.waiting drafts MODEL     several samples, and summaries, with and without drafts
    python -m benchmarks.waiting tables MODEL     tables as a whole, and single rows of them
    python -m benchmarks.waiting routing MODEL    whole layers in memory, and single experts; with even and skewed
                                                  routers. MODEL: synthesized, with a correction bias in its routers

Cases alternate; the table has medians of three rounds and their spread.
"""

import argparse
import gc
import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from jobs.packing.config import PackConfig, SourceConfig
from jobs.packing.packing import pack
from runtime.batching.balance import Block
from runtime.config.settings import (
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.engine.records import PassRecord, Phase
from runtime.engine.session import OnPass, Session
from runtime.library.api import Runtime
from runtime.plan.cost.predict import predict
from runtime.plan.placement.defaults import chunk_tokens
from runtime.plan.placement.experts import Routing
from runtime.plan.planner import RunPlan
from runtime.resources import Resource
from runtime.sequences.sampler import Sampler
from runtime.sequences.sequence import Completion, Request
from runtime.sequences.sequence import Sequence as RunningSequence
from runtime.stream.experts import COUNTED_PASSES
from runtime.units import GIB, MIB

from .devices import READ_CHUNK_MIB, ThrottledRuntime
from .weightstream import make_requests

CORRECTION_BIAS = "e_score_correction_bias"  # of a router: added to the scores that choose the experts
FIRST_ID = 5  # ids below are left to special tokens
WARM_PASSES = 2 * COUNTED_PASSES  # decode passes in which kept experts are counted, chosen and read


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A request, and the tokens that a trained model generated for it: what a model of random weights then `replays`,
    so that as many guesses are right as with a trained one."""

    request: Request
    token_ids: tuple[int, ...]

    @property
    def replaying_request(self) -> Request:
        return replace(self.request, max_new_tokens=len(self.token_ids), ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run: seconds of decode passes and of all, number of decode passes, and the tokens of each request."""

    seconds: float
    all_seconds: float
    num_passes: int
    num_drafted: int
    num_accepted: int
    bytes_read: int
    most_drafted: int | None
    steady_bytes: float  # read by a decode pass after the first `WARM_PASSES`, of the revised plan if there is one
    simulated_bytes: float  # the same as the simulator has it, with the routing of this run
    num_kept: int  # experts that stay in memory
    tokens: dict[int, tuple[int, ...]] = field(repr=False)

    @property
    def rate(self) -> float:
        """New tokens per second of decoding."""
        return sum(len(tokens) - 1 for tokens in self.tokens.values()) / self.seconds


def make_samples(runtime: Runtime, prompts: Sequence[Any]) -> list[Request]:
    samples = [sample for request in make_requests(runtime, prompts) for sample in runtime.samples(request)]
    return [sample for sample in samples if isinstance(sample, Request)]


def record(config: RuntimeConfig, prompts: Sequence[Any]) -> list[Recorded]:
    """Returns what the model of `config` generates. Token ids are numbered anew, in the order in which they occur, so
    that a smaller vocabulary has them, too."""
    with Runtime(config) as runtime:
        requests = make_samples(runtime, prompts)
        with runtime.open_with_backoff(requests) as (_, session):
            found = dict(session.generate(requests))
    numbers = defaultdict[int, int](lambda: FIRST_ID + len(numbers))

    def renumber(token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers[token_id] for token_id in token_ids)

    return [
        Recorded(
            request=replace(request, prompt_ids=renumber(request.prompt_ids)), token_ids=renumber(found[i].token_ids)
        )
        for i, request in enumerate(requests)
    ]


@contextmanager
def replayed(recorded: Sequence[Recorded]) -> Iterator[None]:
    """Every run draws the tokens that are recorded for its requests, whatever its logits are."""
    tokens = {each.request.key: each.token_ids for each in recorded}

    def choose_tokens(sampler: Sampler, sequences: Sequence[RunningSequence], scores_BV: torch.Tensor) -> torch.Tensor:
        return torch.tensor([tokens[sequence.request.key][len(sequence.generated)] for sequence in sequences])

    with mock.patch.object(Sampler, "_choose_tokens", choose_tokens):
        yield


def measure(config: RuntimeConfig, prompts: Sequence[Any], bytes_per_second: float) -> Measured:
    """Runs `prompts`: texts, token ids, or all of them as `Recorded` requests."""
    recorded = [each for each in prompts if isinstance(each, Recorded)]
    runtime = ThrottledRuntime(config, bytes_per_second=bytes_per_second)
    with replayed(recorded) if recorded else nullcontext(), runtime:
        runtime.wait_for_kernels()
        requests = [each.replaying_request for each in recorded] or make_samples(runtime, prompts)
        passes, found, routings = list[PassRecord](), dict[int, Completion](), list[Routing | None]()
        with runtime.open_with_backoff(requests) as (plan, session):

            def on_pass(record: PassRecord) -> None:
                passes.append(record)
                if record.phase is not Phase.prefill and len(routings) < COUNTED_PASSES:
                    routings.append(session.routing)

            if is_revised := config.policy.kind is not PolicyKind.fixed:
                found |= run_blocks(session, plan.blocks[:1], requests, on_pass)
            else:
                found |= dict(session.generate(requests, on_pass))
        num_first = len(passes) if is_revised else 0
        if is_revised:  # as a job does after its first block
            assert plan.rates is not None, "the plan was made with rates"
            routings.append(session.routing)
            plan = runtime.revised(plan, requests, plan.rates, routings[-1])
            with runtime.session(plan) as session:
                found |= run_blocks(session, plan.blocks[1:], requests, on_pass)
        # By what was known when the kept experts were chosen.
        simulated_bytes = simulate_bytes(runtime, plan, requests, routings[-1] if routings else None)
    decode = [record for record in passes if record.phase is not Phase.prefill]
    steady = [record for record in passes[num_first:] if record.phase is not Phase.prefill]
    gc.collect()
    return Measured(
        seconds=sum(record.seconds for record in decode),
        all_seconds=sum(record.seconds for record in passes),
        num_passes=len(decode),
        num_drafted=sum(record.counts.drafted_tokens for record in decode),
        num_accepted=sum(record.counts.accepted_tokens for record in decode),
        bytes_read=sum(record.times.bytes_read_disk for record in decode),
        most_drafted=plan.policy.draft_tokens,
        steady_bytes=mean([record.times.bytes_read_disk for record in steady[WARM_PASSES:]] or [0]),
        simulated_bytes=simulated_bytes,
        num_kept=plan.placement.num_kept_experts,
        tokens={i: completion.token_ids for i, completion in found.items()},
    )


def run_blocks(
    session: Session, blocks: Sequence[Block], requests: Sequence[Request], on_pass: OnPass
) -> dict[int, Completion]:
    return {i: found for block in blocks for i, found in session.wave(block, block.members, requests, {}, on_pass)}


def simulate_bytes(runtime: Runtime, plan: RunPlan, requests: Sequence[Request], routing: Routing | None) -> float:
    """Returns the bytes that an average decode pass reads from disk, as the simulator has it."""
    assert plan.rates is not None, "the plan was made with rates"
    placement, sizes = replace(plan.placement, routing=routing), runtime.sizes(requests)
    chunk, admission = chunk_tokens(plan.policy), plan.policy.admission
    decode = predict(runtime.model.shape, placement, plan.blocks, sizes, chunk, plan.rates, admission).decode
    return decode.busy_seconds[Resource.disk] * plan.rates.disk_bytes_per_second / max(1.0, decode.num_passes)


def compare(cases: Mapping[str, tuple[RuntimeConfig, Sequence[Any]]], bytes_per_second: float, rounds: int) -> None:
    """Runs each case `rounds` times in turn, and prints a table. The first case is the base of the ratios."""
    results = defaultdict[str, list[Measured]](list)
    for _ in range(rounds):
        for name, (config, prompts) in cases.items():
            results[name].append(measure(config, prompts, bytes_per_second))
            print(f"{name}: {results[name][-1]}", file=sys.stderr, flush=True)
    base = next(iter(results.values()))
    columns = "case", "decode tok/s", "spread", "ratio", "passes", "most guessed", "right", "bytes a pass", "rows equal"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, runs in results.items():
        rates, last = [run.rate for run in runs], runs[-1]
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        ratio = median(rates) / median(run.rate for run in base)
        is_equal = all(run.tokens == base[0].tokens for run in runs)
        print(
            f"| {name} | {median(rates):.1f} | {spread} | {ratio:.2f} | {last.num_passes} | {last.most_drafted} "
            f"| {last.num_accepted:,} of {last.num_drafted:,} | {last.bytes_read / last.num_passes / MIB:,.0f} MiB "
            f"| {'yes' if is_equal else 'no'} |",
            flush=True,
        )


def base_config(model: str, args: argparse.Namespace, **sampling: Any) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig.from_name(model),
        offload=OffloadConfig(
            tier=Tier.nvme, resident_layers=0, read_chunk_mib=READ_CHUNK_MIB, host_memory_gib=args.host_memory_gib
        ),
        policy=PolicyConfig(
            kind=PolicyKind.fixed,
            micro_batch_size=min(16, args.block),
            num_micro_batches=-(-args.block // 16),
            admission=args.admission,
        ),
        sampling=SamplingConfig(max_new_tokens=args.new_tokens, **sampling),
    )


def compare_disks(args: argparse.Namespace) -> None:
    prompts = [[(7 * i + j) % 500 + 5 for j in range(24)] for i in range(args.rows)]
    if args.striped:
        compare_stripes(args, prompts)
        return
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        mirrors = [Path(folder) / str(number) for number in range(3)]
        for mirror in mirrors:
            shutil.copytree(args.model, mirror)
        config = replace(base_config(args.model, args, ignore_eos=True))
        config = replace(config, policy=replace(config.policy, draft_tokens=0))

        def with_mirrors(count: int) -> RuntimeConfig:
            return replace(config, model=replace(config.model, mirrors=tuple(map(str, mirrors[:count]))))

        cases = {f"{1 + n} disks" if n else "1 disk": (with_mirrors(n), prompts) for n in (0, 1, 3)}
        compare(cases, args.mib_per_second * MIB, args.rounds)


def compare_stripes(args: argparse.Namespace, prompts: Sequence[Any]) -> None:
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        cases = dict[str, tuple[RuntimeConfig, Sequence[Any]]]()
        for count in (1, 2, 4):
            out = tuple(str(Path(folder) / f"{number}-of-{count}") for number in range(count))
            pack(PackConfig(model=SourceConfig(path=args.model), out=out, verify=False), lambda done, total: None)
            config = base_config(out[0], args, ignore_eos=True)
            config = replace(config, policy=replace(config.policy, draft_tokens=0))
            cases[f"{count} stripes" if count > 1 else "1 disk"] = config, prompts
        compare(cases, args.mib_per_second * MIB, args.rounds)


def compare_drafts(args: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
    texts = [row["prompt"] for row in rows]
    samples = texts[: args.rows // 4]
    for title, prompts, sampling in (
        ("4 samples of each prompt", samples, {"n": 4, "temperature": args.temperature, "seed": 1}),
        ("greedy", texts[: args.rows], {}),
    ):
        config = base_config(args.model, args, **sampling)
        if args.host_memory_gib is not None:
            config = replace(config, offload=replace(config.offload, resident_layers=None))
        if args.replay is not None:
            trained = replace(config, model=ModelConfig.from_name(args.replay), offload=OffloadConfig())
            prompts = record(trained, prompts)

        def with_drafts(count: int | None, config: RuntimeConfig = config) -> RuntimeConfig:
            return replace(config, policy=replace(config.policy, draft_tokens=count))

        print(f"\n{title}\n", flush=True)
        cases = {"without drafts": (with_drafts(0), prompts), "as planned": (with_drafts(None), prompts)}
        if args.draft_model is not None:
            planned = with_drafts(None)
            with_model = replace(planned, policy=replace(planned.policy, draft_model=args.draft_model))
            cases["with a draft model"] = with_model, prompts
        if args.drafted is not None:
            cases[f"{args.drafted} tokens"] = with_drafts(args.drafted), prompts
        compare(cases, args.mib_per_second * MIB, args.rounds)


def compare_tables(args: argparse.Namespace) -> None:
    """The budget of host memory is only for the case that reads single rows."""
    prompts = [[(7 * i + j * j) % 500 + 5 for j in range(24)] for i in range(args.rows)]
    config = base_config(args.model, args, ignore_eos=True)

    def with_tables(*, are_gathered: bool) -> RuntimeConfig:
        host_memory_gib = args.host_memory_gib if are_gathered else None
        offload = replace(config.offload, gather_tables=are_gathered, host_memory_gib=host_memory_gib)
        return replace(config, offload=offload)

    cases = {name: (with_tables(are_gathered=name == "rows"), prompts) for name in ("tables", "rows")}
    compare(cases, args.mib_per_second * MIB, args.rounds)


def skew_routers(source: Path, target: Path, strength: float) -> None:
    """Copies a checkpoint with correction biases of `-strength * log(rank)`, with ranks of a layer's experts in random
    order. With 0.1, visits of synthesized models fall about as 1 / rank (Zipf)."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(0)
    for path in sorted(target.glob("*.safetensors")):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(CORRECTION_BIAS)]:
            ranks = 1 + torch.randperm(len(tensors[name]), generator=generator)
            tensors[name] = (-strength * ranks.double().log()).to(tensors[name].dtype)
        save_file(tensors, path, metadata={"format": "pt"})


def compare_routing(args: argparse.Namespace) -> None:
    """Memory for `args.kept_share` of the weights, beside what a run needs at least."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 500, (args.rows, 24), generator=generator).tolist()
    config = base_config(args.model, args, ignore_eos=True, temperature=args.temperature, seed=1)
    policy = replace(config.policy, micro_batch_size=args.block, num_micro_batches=1, draft_tokens=0)
    policy = replace(policy, kind=PolicyKind.auto if args.revised else PolicyKind.fixed)
    config = replace(config, policy=policy)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        print(
            f"{args.rows} rows in blocks of {args.block}, memory for {args.kept_share:.0%} of the weights, "
            f"{args.mib_per_second:g} MiB/s\n"
        )
        columns = "routers", "memory keeps", "decode tok/s", "spread", "MiB a pass", "simulated", "ratio", "rows equal"
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for strength in args.skew:
            name, model = "even", Path(args.model)
            if strength:
                name, model = f"skewed by {strength:g}", Path(folder) / f"{strength}"
                skew_routers(Path(args.model), model, strength)
            based = replace(config, model=ModelConfig.from_name(str(model)))
            runtime = Runtime(replace(based, offload=replace(based.offload, kept_experts=0)))
            least = runtime.plan(make_requests(runtime, prompts), rates=None)
            num_bytes = least.placement.compute_ledger.total_bytes + args.kept_share * runtime.model.shape.weight_bytes
            runs = defaultdict[int | None, list[Measured]](list)
            for _ in range(args.rounds):
                for kept in (0, None):
                    offload = replace(
                        based.offload, resident_layers=None, kept_experts=kept, host_memory_gib=num_bytes / GIB
                    )
                    runs[kept].append(measure(replace(based, offload=offload), prompts, args.mib_per_second * MIB))
                    print(f"{name}, {kept}: {runs[kept][-1]}", file=sys.stderr, flush=True)
            base = runs[0]
            for each in runs.values():
                rates, last = [run.rate for run in each], each[-1]
                print(
                    f"| {name} | {f'{last.num_kept:,} experts' if last.num_kept else 'whole layers'} "
                    f"| {median(rates):.1f} | {min(rates):.1f} to {max(rates):.1f} "
                    f"| {last.steady_bytes / MIB:,.1f} | {last.simulated_bytes / MIB:,.1f} "
                    f"| {median(rates) / median(run.rate for run in base):.2f} "
                    f"| {'yes' if all(run.tokens == base[0].tokens for run in each) else 'no'} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["disks", "drafts", "tables", "routing"])
    parser.add_argument("model")
    parser.add_argument("--striped", action="store_true", help="disks: one packed store on several, without copies")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--block", type=int, default=64, help="rows that run at a time")
    parser.add_argument("--admission", default="wave")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--mib-per-second", type=float, default=100.0, help="of each disk")
    parser.add_argument("--host-memory-gib", type=float, default=None)
    parser.add_argument("--scratch", help="folder for mirrors and stripes")
    parser.add_argument("--prompts", help="drafts: JSON lines with `prompt`")
    parser.add_argument("--replay", help="drafts: a trained model, whose text MODEL repeats")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--drafted", type=int, help="drafts: another case with so many guessed tokens")
    parser.add_argument("--draft-model", help="drafts: another case with this small model")
    parser.add_argument(
        "--skew", type=float, nargs="+", default=[0.0, 0.1], help="routing: a model each, see `skew_routers`; 0: even"
    )
    parser.add_argument(
        "--revised", action="store_true", help="routing: search the policy, and plan again after the first block"
    )
    parser.add_argument("--kept-share", type=float, default=0.25, help="routing: weights that fit in memory")
    args = parser.parse_args()
    {"disks": compare_disks, "drafts": compare_drafts, "tables": compare_tables, "routing": compare_routing}[args.what](
        args
    )


if __name__ == "__main__":
    main()
