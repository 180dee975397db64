"""Picks the linear backends of a run on a machine where `jobs.measure` was not used. During planning, the backends for
a model's main products are compared with the default backend, in under a second. Results are saved for later runs.

A linear backend is an implementation of products with stored weights (`linear/backends.py`). A kind of product is its
dtypes and whether it has more inputs than outputs. In a round, each backend is timed once for a few milliseconds.

Other processes on the machine must not decide the choice for all later runs. So backends alternate, and only the best
round of each counts. A suspicious result is marked as doubtful: then the next run repeats the comparison, and the
default backend is used until a second run confirms the result.

A product is x (M rows, K inputs) by weights (N outputs, K).
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
from .linear import DTYPES, MIN_GAIN, ROWS, BackendProductKind, backend_product_kinds, matmul_timer
from .machine_cache import BackendComparison, Host, find_comparisons, save_comparisons
from .timing import Clock, Timer

log = logging.getLogger(__name__)

SECONDS = 0.7  # for all comparisons of a run; comparisons that do not fit are left to the next run
MIN_FLOPS_SHARE = 0.05  # products with a smaller share of the run's FLOPs are not compared
NUM_ROUNDS, MIN_ROUNDS = 6, 3  # fewer than 3 are in doubt: the same event may slow two consecutive rounds
CALL_FLOPS = 0.5e9  # FLOPs per thread of one call: a few milliseconds
MIN_OUTPUTS = 128  # outputs per thread of one call
WEIGHT_BYTES = 32 * MIB  # all weights of a comparison: more than caches, so that they come from memory as in a run
ELIMINATION_SHARE = 0.5  # backends slower than this share of the fastest rate drop out after the first round
SUSPICIOUS_RATIO = 2.0  # the default is rarely this much slower than the fastest, unless it was disturbed
MAX_SPREAD = 1.3  # largest ratio of a backend's fastest to its slowest round without a doubt
LOADAVG = Path("/proc/loadavg")


@dataclass(frozen=True, kw_only=True)
class Product:
    """A model's product with the most FLOPs of its kind and M. `flops`: of all products of this kind and M in a run, up
    to a common factor."""

    kind: BackendProductKind
    num_rows: int
    num_outputs: int
    num_inputs: int
    flops: float

    @property
    def name(self) -> str:
        return _product_name(self.kind, self.num_rows)


def running_threads() -> int:
    """The number of runnable threads on the whole machine; 0 if unknown."""
    try:
        return int(LOADAVG.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0


def known_backends(host: Host) -> BackendTable | None:
    """The fastest backends that earlier runs found on this host; None if the default is the fastest for all
    products."""
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
    """The fastest backends known for this host, after comparing them for those products of `load` that have no result
    yet, or a doubtful one. Takes `SECONDS`, and at most one comparison longer. Allocates `WEIGHT_BYTES`, freed on
    return."""
    comparisons, begin = find_comparisons(host, _kernels_digest()), clock()
    products = main_products(model.shape, model.compute_dtype, load)
    pending = [one for one in products if (known := comparisons.get(one.name)) is None or known.doubt is not None]
    # Products that were compared least often come first.
    pending.sort(key=lambda product: comparisons[product.name].num_times if product.name in comparisons else 0)
    for index, product in enumerate(pending):
        seconds = SECONDS - (clock() - begin)
        if seconds <= 0:
            break
        name, share = product.name, seconds / (len(pending) - index)
        comparisons[name] = _compare(product, comparisons.get(name), share, clock=clock, num_running=num_running)
        log.debug("linear backends: %s: %s", name, comparisons[name])
    if pending:
        try:
            save_comparisons(host, _kernels_digest(), comparisons)
        except OSError as error:
            log.debug("%s: cannot save the comparison of linear backends: %s", host.path, error.strerror)
    return _make_table(comparisons)


def main_products(shape: ModelShape, compute: torch.dtype, load: TypicalLoad) -> list[Product]:
    """A model's main products of the kinds in a backend table, in decode and prefill passes, most FLOPs first. Their M
    is the nearest one in `ROWS`."""
    num_new = 2 * (load.num_positions - load.num_prompt_tokens)  # `num_positions` is halfway through the output
    groups: dict[tuple[BackendProductKind, int], list[Product]] = defaultdict(list)
    # Decode, then prefill: tokens in a pass, and tokens of a sequence in all such passes.
    for num_tokens, num_total in ((load.num_rows, num_new), (load.chunk_tokens, load.num_prompt_tokens)):
        for kind, num_rows, shape_NK, flops in _products(shape, compute, num_tokens):
            nearest = min(ROWS, key=lambda rows: abs(log2(rows / num_rows)))
            product = Product(
                kind=kind, num_rows=nearest, num_outputs=shape_NK[0], num_inputs=shape_NK[1], flops=num_total * flops
            )
            groups[kind, nearest].append(product)
    merged = [  # per kind and M: the largest product, with the FLOPs of all
        replace(max(group, key=lambda product: product.flops), flops=sum(product.flops for product in group))
        for group in groups.values()
    ]
    total = sum(product.flops for product in merged)
    main = [product for product in merged if product.flops > MIN_FLOPS_SHARE * total]
    return sorted(main, key=lambda product: -product.flops)


def _products(
    shape: ModelShape, compute: torch.dtype, num_tokens: int
) -> Iterator[tuple[BackendProductKind, int, tuple[int, int], float]]:
    """Yields the products of a pass of `num_tokens` tokens: kind, M, the weights' (N, K), and FLOPs per token."""
    inputs = DTYPE_NAMES.get(compute)
    for stage, work in zip(shape.stages, stage_works(shape, frozenset()), strict=True):
        stacks = {parameter.name for parameter in stage.stacks}
        for parameter in stage.parameters if stage.kind not in (StageKind.embedding, StageKind.bridge) else ():
            piece, is_stack = parameter.pieces[0][0], parameter.name in stacks  # a stack: weights of all experts
            # None for quantized weights, and for dtypes that a backend table does not have.
            stored = None if piece.format else DTYPE_NAMES.get(TORCH_DTYPES.get(piece.dtype, torch.bool))
            if inputs is None or stored is None or inputs not in (FLOAT32, stored):
                continue
            if len(parameter.shape) != 2 + is_stack:
                continue
            height, width = parameter.shape[-2:]
            num_outputs, num_inputs = (width, height) if parameter.is_transposed else (height, width)
            num_visits = work.num_experts_per_token if is_stack else 1
            # For experts, M is the mean number of tokens per expert that gets any.
            num_rows = max(1, round(num_tokens * num_visits / work.hits(num_tokens))) if is_stack else num_tokens
            kind = BackendProductKind(inputs, stored, is_tall=num_inputs > num_outputs)
            yield kind, num_rows, (num_outputs, num_inputs), 2.0 * num_visits * num_outputs * num_inputs


def _compare(
    product: Product, before: BackendComparison | None, seconds: float, *, clock: Clock, num_running: Callable[[], int]
) -> BackendComparison:
    """Compares the backends for one product, in rounds for at most `seconds` (at least one). `before`: the result of
    earlier runs. A backend's rate is that of its best round, including earlier runs."""
    begin, num_cpus = clock(), os.cpu_count() or 1
    probes, default, shape_NK = _probes(product, clock)
    rounds = {backend: [probe()] for backend, probe in probes.items()}  # GFLOP/s of each round
    running = [num_running()]  # runnable threads after each round
    min_rate = ELIMINATION_SHARE * max(rates[0] for rates in rounds.values())
    candidates = [backend for backend in probes if backend is default or rounds[backend][0] >= min_rate]
    while len(candidates) > 1 and len(rounds[default]) < NUM_ROUNDS and not _is_decided(rounds, default):
        if clock() - begin >= seconds:
            break
        for backend in candidates:
            rounds[backend].append(probes[backend]())
        running.append(num_running())
    earlier = before.gflops if before is not None else {}
    gflops = {backend.value: max(*rates, earlier.get(backend.value, 0.0)) for backend, rates in rounds.items()}
    num_times = 1 + (before.num_times if before is not None else 0)
    slowdown, busy = max(gflops.values()) / gflops[default.value], median(running)
    spread = max(max(rounds[backend]) / min(rounds[backend]) for backend in candidates)
    doubt = None
    if busy > num_cpus:
        doubt = f"{busy:.0f} threads shared {num_cpus} processors"
    elif len(candidates) > 1 and len(rounds[default]) < MIN_ROUNDS and num_times < MIN_ROUNDS:
        doubt = f"there was time for {len(rounds[default])} of {MIN_ROUNDS} rounds"
    elif spread > MAX_SPREAD and not _is_decided(rounds, default):
        doubt = f"rounds of one backend differed by {spread:.2g} times"
    elif slowdown > SUSPICIOUS_RATIO and num_times < 2:
        doubt = f"the default, {default.value}, took {slowdown:.2g} times as long as another"
    conditions: dict[str, object] = {
        "weights": list(shape_NK),
        "rounds": len(rounds[default]),
        "seconds": round(clock() - begin, 3),
        "running_threads": busy,
        "processors": num_cpus,
    }
    return BackendComparison(gflops=gflops, num_times=num_times, doubt=doubt, conditions=conditions)


def _is_decided(rounds: Mapping[LinearBackend, list[float]], default: LinearBackend) -> bool:
    """True if each round of the default was faster than all rounds of the best other backend, or the reverse."""
    others = [rates for backend, rates in rounds.items() if backend is not default]
    best = max(others, key=max, default=[0.0])
    if len(rounds[default]) < MIN_ROUNDS:
        return False
    return min(best) > max(rounds[default]) or min(rounds[default]) > max(best)


def _probes(product: Product, clock: Clock) -> tuple[dict[LinearBackend, Timer], LinearBackend, tuple[int, int]]:
    """Returns timers by backend, the default backend, and (N, K) of the weights in one call. Weights are random: the
    model's are not read yet, and values do not affect the time."""
    kind, num_inputs, threads = product.kind, product.num_inputs, torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[kind.stored]
    max_outputs = max(1, WEIGHT_BYTES // (dtype.itemsize * num_inputs))
    num_wanted = max(MIN_OUTPUTS * threads, int(CALL_FLOPS * threads / (2 * product.num_rows * num_inputs)) // 32 * 32)
    num_outputs = min(product.num_outputs, num_wanted, max_outputs)
    # WEIGHT_BYTES of random rows, repeated 64 times to save time, split into weights for consecutive calls.
    sample = torch.randn(max(1, max_outputs // 64), num_inputs, generator=generator).to(dtype)
    numbers = sample.repeat(-(-max_outputs // len(sample)), 1)[: max_outputs // num_outputs * num_outputs]
    x_MK = torch.randn(product.num_rows, num_inputs, generator=generator).to(DTYPES[kind.inputs])
    batches = [[weight] for weight in numbers.split(num_outputs)]
    backends = supported_backends(x_MK, batches[0])
    default = default_backend(backends.__contains__, product.num_rows, x_MK.dtype)
    if default is not LinearBackend.pairs and LinearBackend.pairs in backends:
        backends.remove(LinearBackend.pairs)  # compiling it would take seconds

    def make_timer(backend: LinearBackend) -> Timer:
        def multiply(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
            return BACKENDS[backend](x_MK, [weight_NK])

        return matmul_timer([x_MK], batches, ComputeDevice("cpu"), multiply, clock=clock)

    probes = {backend: make_timer(backend) for backend in backends}
    return probes, default, (num_outputs, num_inputs)


def _make_table(comparisons: Mapping[str, BackendComparison]) -> BackendTable:
    """A table of the fastest backends, for kinds for which a backend is faster than the default at some M; other kinds
    are not in it."""
    multipliers: dict[str, list[LinearBackend]] = {}
    for kind in backend_product_kinds():
        known = [comparisons.get(_product_name(kind, rows)) for rows in ROWS]
        if not any(known):
            continue
        defaults = [kind.default(rows) for rows in ROWS]
        fastest = [
            default if comparison is None else LinearBackend(comparison.winner(default.value, MIN_GAIN))
            for comparison, default in zip(known, defaults, strict=True)
        ]
        if fastest != defaults:
            multipliers[str(kind)] = fastest
    return BackendTable(rows=list(ROWS), multipliers=multipliers) if multipliers else DEFAULT_BACKENDS


def _product_name(kind: BackendProductKind, num_rows: int) -> str:
    return f"{kind}, M={num_rows}"


@cache
def _kernels_digest() -> str:
    """SHA-256 (hex) of the source of kernels and backends: backends are compared again after a change."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted([*(root / "kernels").rglob("*.py"), *(root / "linear").rglob("*.py")]):
        digest.update(f"\0{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
