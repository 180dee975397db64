"""Times the compiled decode attention over pages of every `kv.dtype`, in positions: `python -m tests.kv_speed`.

Two minutes on a machine that does nothing else. A layer of Llama-3-8B, rows of 512 positions in more bytes than a cache
holds. Each dtype is timed in turns with the others, so that a machine that slows down slows all of them.
"""

import argparse
from statistics import median

import torch

from runtime.config.settings import KVDType
from runtime.measure.attention import AttentionShape, decode_timer
from runtime.stream.device import ComputeDevice

NUM_POSITIONS, ROUNDS, KEPT = 512, 5, (KVDType.auto, KVDType.bfloat16, KVDType.float8, KVDType.int8, KVDType.int4)


def rates(num_rows: int, num_layers: int, rounds: int) -> dict[KVDType, list[float]]:
    """Million positions per second of each dtype, of each round."""
    device, results = ComputeDevice("cpu"), dict[KVDType, list[float]]()
    probes = {}
    for dtype in KEPT:
        shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.float32, kv_dtype=dtype)
        timed = decode_timer(shape, device, num_rows, NUM_POSITIONS, num_layers=num_layers)
        probes[dtype] = shape.position_bytes, timed
        results[dtype] = []
    for _ in range(rounds):
        for dtype, (position_bytes, timed) in probes.items():
            results[dtype].append(timed.rate() / position_bytes / 1e6)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    results = rates(arguments.rows, arguments.layers, arguments.rounds)
    exact, threads = median(results[KVDType.auto]), torch.get_num_threads()
    print(f"{arguments.rows} rows of {NUM_POSITIONS} positions, {arguments.layers} layers, {threads} threads")
    print("| kv.dtype | million positions/s | of float32's | least and most |\n|---|---|---|---|")
    for dtype, each in results.items():
        name = "float32" if dtype is KVDType.auto else dtype.value
        print(f"| {name} | {median(each):.2f} | {median(each) / exact:.2f} | {min(each):.2f} to {max(each):.2f} |")


if __name__ == "__main__":
    main()
