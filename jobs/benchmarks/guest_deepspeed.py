"""DeepSpeed's ZeRO-Inference as a peer: `python -m jobs.benchmarks.guest_deepspeed JSON` in an environment that has it.

ZeRO stage 3 of one process: parameters in host memory, or in files beside the checkpoint that are gone with the
process, and gathered when the forward comes to them.
"""

import json
import os
import socket
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import deepspeed  # pyright: ignore[reportMissingImports] - in this worker's environment alone
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from runtime.config import Tier
from runtime.stream.host_memory import resident_bytes
from runtime.units import MIB, round_up

from .contenders import Peer
from .generation import generated
from .task import Result, Task


def generate(task: Task) -> Result:
    torch.set_num_threads(task.num_threads)
    peer = task.entry
    assert isinstance(peer, Peer)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(_free_port())
    _build_anew_what_was_stopped(Path(sys.prefix) / "extensions")
    baseline = resident_bytes()
    with tempfile.TemporaryDirectory(dir=Path(task.path).parent) as folder:
        config = _settings(peer.tier, Path(task.path), folder)
        partitioned = HfDeepSpeedConfig(config)  # while it lives, models are loaded in pieces
        model = AutoModelForCausalLM.from_pretrained(task.path, dtype=torch.float32)
        engine = deepspeed.initialize(model=model, config=config)[0]
        engine.eval()
        result = generated(engine.module, task, baseline)
        del partitioned
        return result


def _settings(tier: Tier, checkpoint: Path, folder: str) -> dict[str, object]:
    """As in DeepSpeed's own examples of ZeRO-Inference: with its defaults a model of 10^9 parameters stays gathered.
    A buffer holds the largest parameter."""
    model_config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        largest = max(weights.numel() for weights in AutoModelForCausalLM.from_config(model_config).parameters())
    width = model_config.get_text_config().hidden_size
    files = {"nvme_path": folder, "buffer_count": 5, "buffer_size": round_up(largest, MIB)} if tier is Tier.nvme else {}
    return {
        "train_micro_batch_size_per_gpu": 1,  # it asks for one
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * width * width,
            "stage3_param_persistence_threshold": width,
            "stage3_max_live_parameters": 2 * width * width,
            "offload_param": {"device": tier.value, **files},
        },
    }


def _build_anew_what_was_stopped(folder: Path) -> None:
    """Has its operators compiled, at their first use, into `folder` of its environment. A build that was killed leaves
    a lock, for which the next would wait for ever; only this worker builds there."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    for lock in folder.glob("*/lock"):
        lock.unlink()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(generate(Task(**json.loads(sys.argv[1]))))) + "\n")
