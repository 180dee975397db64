"""A Llama of given size, streamed whole from its files: `python -m jobs.benchmarks.scale_worker JSON` answers in
JSON."""

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from runtime.api import Runtime
from runtime.config import (
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.engine.records import PassRecord
from runtime.stream.host_memory import peak_resident_bytes
from runtime.synthesize.checkpoints import synthesize_checkpoint

from .millrace import prefill_seconds, requests_of
from .scale_size import HEAD_DIM, LANE_SIZE, NUM_NEW_TOKENS, Size
from .task import Result, forget_pages


def synthesize(size: Size, path: Path) -> None:
    """Random weights in bfloat16; `path` must be empty or not there."""
    architecture = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": 11 * size.hidden_size // 4,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.hidden_size // HEAD_DIM,
        "num_key_value_heads": 1,
        "max_position_embeddings": size.prompt_tokens + NUM_NEW_TOKENS,
        "tie_word_embeddings": False,
    }
    synthesize_checkpoint(model="llama", overrides=architecture, directory=path, dtype=torch.bfloat16)


def measure(size: Size, path: Path, num_threads: int) -> Result:
    """No layer stays, whatever memory is free. The checkpoint's pages are dropped from the page cache first."""
    torch.set_num_threads(num_threads)
    forget_pages(path)
    runtime = Runtime(_config(size, path, num_threads))
    draw = random.Random(size.prompt_tokens)
    ids = [[draw.randrange(10, size.vocab_size) for _ in range(size.prompt_tokens)] for _ in range(size.block)]
    requests = requests_of(runtime, ids)
    passes: list[PassRecord] = []
    with runtime.confirmed_session(requests) as (plan, session):
        for block in plan.blocks:
            session.run(block, requests, passes.append)
    seconds = sum(record.seconds for record in passes)
    return Result(
        seconds=seconds,
        prefill_seconds=prefill_seconds(passes),
        rate=size.block * NUM_NEW_TOKENS / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=runtime.baseline_bytes,
        bytes_read=sum(record.times.bytes_read_disk for record in passes),
        tokens=[],
    )


def _config(size: Size, path: Path, num_threads: int) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig(name="bench", path=str(path)),
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=0),
        policy=PolicyConfig(
            kind=PolicyKind.fixed, micro_batch_size=LANE_SIZE, num_micro_batches=-(-size.block // LANE_SIZE)
        ),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
        machine=MachineConfig(num_threads=num_threads),
    )


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    result = measure(Size(**asked["size"]), Path(asked["path"]), asked["num_threads"])
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
