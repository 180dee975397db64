"""Picks the linear backends of a run on a machine without `jobs.measure`. During planning, candidate backends for the
main products of a model are timed against the default backend, in under a second. Results are kept for later runs.

Load from other processes must not decide permanently. Rounds are short, candidates alternate, and each one's best round
counts. A comparison with suspicious timings is marked doubtful: the default stays until a second run confirms the
result, and each run repeats doubtful comparisons.

M rows, N outputs, K inputs.
"""

import hashlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import log2
from pathlib import Path
from statistics import median

import torch

from ..config.profiles import DEFAULT_BACKENDS, FLOAT32, BackendTable, LinearBackend
from ..linear.backends import BACKENDS, DTYPE_NAMES, default_backend, supported_backends
from ..model.loading import LoadedModel
from ..plan.cost.calibration import TypicalLoad
from ..plan.cost.work import stage_works
from ..plan.shape.model import ModelShape
from ..plan.shape.shapes import StageKind
from ..stream.device import ComputeDevice
from ..units import MIB
from ..weights.stage_weights import TORCH_DTYPES
from .linear import DTYPES, MIN_GAIN, ROWS, MatmulKind, matmul_kinds, matmul_timer
from .machine_cache import BackendComparison, Host, find_comparisons, save_comparisons
from .timing import Clock, Timer

log = logging.getLogger(__name__)

SECONDS = 0.7  # for all comparisons of a run; the rest is left to the next run
MIN_FLOPS_SHARE = 0.05  # least share of a run's FLOPs for a product to be compared
NUM_ROUNDS, MIN_ROUNDS = 6, 3  # two consecutive rounds may be slowed by the same event
ACT_FLOPS = 0.5e9  # per thread and call: a few milliseconds, with enough outputs for each thread
MIN_OUTPUTS = 128  # per thread and call
WEIGHT_BYTES = 32 * MIB  # working set of weights: with few rows they come from memory, as in a run
ELIMINATION_SHARE = 0.5  # of the fastest: a backend slower than this in the first round is dropped
SUSPICIOUS_RATIO = 2.0  # the default is rarely this much slower than the fastest: it may have been disturbed
MAX_SPREAD = 1.3  # ratio of a backend's fastest to its slowest round
LOADAVG = Path("/proc/loadavg")


@dataclass(frozen=True, kw_only=True)
class Product:
    """x (M, K) by weights (N, K), the product with the most FLOPs of its kind in a model. `flops`: the total of the
    kind."""

    kind: MatmulKind
    num_rows: int
    num_outputs: int
    num_inputs: int
    flops: float

    @property
    def name(self) -> str:
        return _product_name(self.kind, self.num_rows)


def running_threads() -> int:
    """Runnable threads on the whole machine; 0 if unknown."""
    try:
        return int(LOADAVG.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0


def known_backends(host: Host) -> BackendTable | None:
    """The backends that earlier runs on this host found; None if none beats the default."""
    table = _make_table(find_comparisons(host, _kernels_digest()))
    return None if table == DEFAULT_BACKENDS else table


@torch.inference_mode()
def compare_backends(
    model: LoadedModel,
    host: Host,
    load: TypicalLoad,
    *,
    clock: Clock = time.perf_counter,
    num_running: Callable[[], int] = running_threads,
) -> BackendTable:
    """The fastest known backends, after comparing unknown or doubtful products of a run with `usual` passes. Takes
    `SECONDS`, plus at most one comparison, and `WEIGHT_BYTES`, which are freed on return."""
    found, begin = find_comparisons(host, _kernels_digest()), clock()
    main = main_products(model.shape, model.compute_dtype, load)
    wanted = [each for each in main if each.name not in found or found[each.name].doubt is not None]
    wanted.sort(key=lambda each: found[each.name].num_times if each.name in found else 0)
    for place, each in enumerate(wanted):
        left = SECONDS - (clock() - begin)
        if left <= 0:
            break
        share = left / (len(wanted) - place)
        found[each.name] = _compare(each, found.get(each.name), share, clock=clock, num_running=num_running)
        log.info("linear backends: %s: %s", each.name, found[each.name])
    if wanted:
        try:
            save_comparisons(host, _kernels_digest(), found)
        except OSError as error:
            log.info("%s: cannot save the comparison of linear backends: %s", host.path, error.strerror)
    return _make_table(found)


def main_products(shape: ModelShape, compute: torch.dtype, load: TypicalLoad) -> list[Product]:
    """A model's products in decode and prefill passes that a backend table covers, most FLOPs first."""
    num_new = 2 * (load.num_positions - load.num_prompt_tokens)
    found: dict[tuple[MatmulKind, int], list[Product]] = defaultdict(list)
    for num_tokens, weight in (
        (load.num_rows, num_new),
        (load.chunk_tokens, load.num_prompt_tokens),
    ):
        for kind, num_rows, shape_NK, flops in _products(shape, compute, num_tokens):
            nearest = min(ROWS, key=lambda rows: abs(log2(rows / num_rows)))
            one = Product(
                kind=kind, num_rows=nearest, num_outputs=shape_NK[0], num_inputs=shape_NK[1], flops=weight * flops
            )
            found[kind, nearest].append(one)
    merged = [
        replace(max(alike, key=lambda each: each.flops), flops=sum(each.flops for each in alike))
        for alike in found.values()
    ]
    total = sum(each.flops for each in merged)
    main = [each for each in merged if each.flops > MIN_FLOPS_SHARE * total]
    return sorted(main, key=lambda each: -each.flops)


def _products(
    shape: ModelShape, compute: torch.dtype, num_tokens: int
) -> Iterator[tuple[MatmulKind, int, tuple[int, int], float]]:
    """Yields the products of a pass of `num_tokens`: kind, rows, the weights' (N, K), and FLOPs per token."""
    inputs = DTYPE_NAMES.get(compute)
    for stage, work in zip(shape.stages, stage_works(shape, frozenset()), strict=True):
        stacks = {parameter.name for parameter in stage.stacks}
        for parameter in stage.parameters if stage.kind not in (StageKind.embedding, StageKind.bridge) else ():
            piece, is_stack = parameter.pieces[0][0], parameter.name in stacks
            stored = None if piece.format else DTYPE_NAMES.get(TORCH_DTYPES.get(piece.dtype, torch.bool))
            if inputs is None or stored is None or inputs not in (FLOAT32, stored):
                continue
            if len(parameter.shape) != 2 + is_stack:
                continue
            num_outputs, num_inputs = parameter.shape[-2:][:: -1 if parameter.is_transposed else 1]
            num_visits = work.num_experts_per_token if is_stack else 1
            num_rows = max(1, round(num_tokens * num_visits / work.hits(num_tokens))) if is_stack else num_tokens
            kind = MatmulKind(inputs, stored, is_tall=num_inputs > num_outputs)
            yield kind, num_rows, (num_outputs, num_inputs), 2.0 * num_visits * num_outputs * num_inputs


def _compare(
    product: Product,
    before: BackendComparison | None,
    seconds: float,
    *,
    clock: Clock,
    num_running: Callable[[], int],
) -> BackendComparison:
    """Runs one comparison. A backend's rate is its best round over all comparisons."""
    begin, num_cpus = clock(), os.cpu_count() or 1
    probes, usual, shape_NK = _probes(product, clock)
    rounds, running = {way: [probe()] for way, probe in probes.items()}, [num_running()]
    fastest = max(each[0] for each in rounds.values())
    left = [way for way in probes if way is usual or rounds[way][0] >= ELIMINATION_SHARE * fastest]
    while len(left) > 1 and len(rounds[usual]) < NUM_ROUNDS and not _is_decided(rounds, usual):
        if clock() - begin >= seconds:
            break
        for way in left:
            rounds[way].append(probes[way]())
        running.append(num_running())
    earlier = before.gflops if before is not None else {}
    gflops = {way.value: max(*each, earlier.get(way.value, 0.0)) for way, each in rounds.items()}
    num_times = 1 + (before.num_times if before is not None else 0)
    behind, busy = max(gflops.values()) / gflops[usual.value], median(running)
    spread = max(max(rounds[way]) / min(rounds[way]) for way in left)
    doubt = None
    if busy > num_cpus:
        doubt = f"{busy:.0f} threads wanted {num_cpus} processors"
    elif len(left) > 1 and len(rounds[usual]) < MIN_ROUNDS and num_times < MIN_ROUNDS:
        doubt = f"there was time for {len(rounds[usual])} of {MIN_ROUNDS} rounds"
    elif spread > MAX_SPREAD and not _is_decided(rounds, usual):
        doubt = f"rounds of one backend differed by {spread:.2g} times"
    elif behind > SUSPICIOUS_RATIO and num_times < 2:
        doubt = f"{usual.value}, which the rule takes, was {behind:.2g} times as slow as another"
    conditions: dict[str, object] = {
        "weights": list(shape_NK),
        "rounds": len(rounds[usual]),
        "seconds": round(clock() - begin, 3),
        "running_threads": busy,
        "processors": num_cpus,
    }
    return BackendComparison(gflops=gflops, num_times=num_times, doubt=doubt, conditions=conditions)


def _is_decided(rounds: Mapping[LinearBackend, list[float]], usual: LinearBackend) -> bool:
    """True if either the default or the best of the others was faster in all rounds."""
    others = [each for way, each in rounds.items() if way is not usual]
    best = max(others, key=max, default=[0.0])
    if len(rounds[usual]) < MIN_ROUNDS:
        return False
    return min(best) > max(rounds[usual]) or min(rounds[usual]) > max(best)


def _probes(product: Product, clock: Clock) -> tuple[dict[LinearBackend, Timer], LinearBackend, tuple[int, int]]:
    """Timers by backend, the default backend, and the (N, K) of one call. Weights are random, since the model's are not
    read yet and values do not affect the time."""
    kind, num_inputs, threads = product.kind, product.num_inputs, torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[kind.stored]
    most = max(1, WEIGHT_BYTES // (dtype.itemsize * num_inputs))
    wanted = max(MIN_OUTPUTS * threads, int(ACT_FLOPS * threads / (2 * product.num_rows * num_inputs)) // 32 * 32)
    num_outputs = min(product.num_outputs, wanted, most)
    some = torch.randn(max(1, most // 64), num_inputs, generator=generator).to(dtype)
    numbers = some.repeat(-(-most // len(some)), 1)[: most // num_outputs * num_outputs]
    x_MK = torch.randn(product.num_rows, num_inputs, generator=generator).to(DTYPES[kind.inputs])
    batches = [[weight] for weight in numbers.split(num_outputs)]
    ways = supported_backends(x_MK, batches[0])
    usual = default_backend(ways.__contains__, product.num_rows, x_MK.dtype)
    if usual is not LinearBackend.pairs and LinearBackend.pairs in ways:
        ways.remove(LinearBackend.pairs)  # compiling it would take seconds

    def multiply_by(way: LinearBackend) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda x_MK, weight_NK: BACKENDS[way](x_MK, [weight_NK])

    probes = {way: matmul_timer([x_MK], batches, ComputeDevice("cpu"), multiply_by(way), clock=clock) for way in ways}
    return probes, usual, (num_outputs, num_inputs)


def _make_table(found: Mapping[str, BackendComparison]) -> BackendTable:
    """A table with the kinds for which another backend beats the default at some row count. All others use the
    default."""
    multipliers: dict[str, list[LinearBackend]] = {}
    for kind in matmul_kinds():
        if not any(_product_name(kind, rows) in found for rows in ROWS):
            continue
        usual = [kind.default(rows) for rows in ROWS]
        each = [(found.get(_product_name(kind, rows)), way) for rows, way in zip(ROWS, usual, strict=True)]
        taken = [way if one is None else LinearBackend(one.winner(way.value, MIN_GAIN)) for one, way in each]
        if taken != usual:
            multipliers[str(kind)] = taken
    return BackendTable(rows=list(ROWS), multipliers=multipliers) if multipliers else DEFAULT_BACKENDS


def _product_name(kind: MatmulKind, num_rows: int) -> str:
    return f"{kind}, M={num_rows}"


@cache
def _kernels_digest() -> str:
    """SHA-256 in hex of the kernels' source: changed code is compared again."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted([*(root / "kernels").rglob("*.py"), *(root / "linear").rglob("*.py")]):
        digest.update(f"\0{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
