"""Measures DeepSpeed's ZeRO-Inference: ZeRO stage 3 in one process, on the CPU or a device.

Parameters are in host memory or in temporary files. They are gathered, that is loaded as whole tensors, for the forward
of their module. On the CPU, DeepSpeed is in a separate environment.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports] - only in some environments
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from runtime.config.settings import Tier
from runtime.stream.device import ComputeDevice
from runtime.stream.host_memory import resident_bytes
from runtime.units import MIB, round_up

from ..contenders import Peer
from ..task import BenchmarkTask, Result
from .hugging_face import DeviceModel, measure_generation


def generate(task: BenchmarkTask) -> Result:
    torch.set_num_threads(task.num_threads)
    peer = task.entry
    assert isinstance(peer, Peer)
    _set_single_process()
    _set_extensions_folder(Path(sys.prefix) / "extensions")
    baseline = resident_bytes()
    with tempfile.TemporaryDirectory(dir=Path(task.path).parent) as folder:
        config = _streamed_settings(peer.tier, Path(task.path), folder)
        partitioning = HfDeepSpeedConfig(config)  # while it lives, from_pretrained partitions as it loads
        model = AutoModelForCausalLM.from_pretrained(task.path, dtype=torch.float32)
        engine = deepspeed.initialize(model=model, config=config)[0]
        engine.eval()
        result = measure_generation(engine.module, task, baseline)
        del partitioning
        return result


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield asdict(generate(BenchmarkTask(**question)))


def partition_model(model: PreTrainedModel, device: ComputeDevice) -> DeviceModel:
    """Offloads with ZeRO: weights are copied to pinned host memory, and to the device one layer ahead."""
    _set_single_process()
    layer_elements = sum(p.numel() for name, p in model.named_parameters() if ".layers.0." in name)
    settings = zero_settings(
        {"device": Tier.cpu.value, "pin_memory": True},
        persistent_elements=0,
        prefetched_elements=layer_elements,
        live_elements=2 * layer_elements,
    )
    engine, *_ = deepspeed.initialize(model=model, config={**settings, "bf16": {"enabled": True}})
    engine.module.eval()
    return DeviceModel(engine.module, device)


def zero_settings(
    offload: dict[str, object], *, persistent_elements: int, prefetched_elements: int, live_elements: int
) -> dict[str, object]:
    """Settings of ZeRO stage 3, as in DeepSpeed's examples of ZeRO-Inference. With its defaults, up to 10^9 parameters
    stay gathered. Parameters of at most `persistent_elements` elements always do."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # required
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": prefetched_elements,
            "stage3_param_persistence_threshold": persistent_elements,
            "stage3_max_live_parameters": live_elements,
            "offload_param": offload,
        },
    }


def _streamed_settings(tier: Tier, checkpoint: Path, folder: str) -> dict[str, object]:
    """Settings for weights in memory or in files of `folder`, with buffers for the largest parameter."""
    model_config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        largest = max(weights.numel() for weights in AutoModelForCausalLM.from_config(model_config).parameters())
    width = model_config.get_text_config().hidden_size
    files = {"nvme_path": folder, "buffer_count": 5, "buffer_size": round_up(largest, MIB)} if tier is Tier.nvme else {}
    return zero_settings(
        {"device": tier.value, **files},
        persistent_elements=width,
        prefetched_elements=2 * width * width,
        live_elements=2 * width * width,
    )


def _set_single_process() -> None:
    """Sets the variables of torch's process groups for a single process."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])


def _set_extensions_folder(folder: Path) -> None:
    """Sets the folder in which DeepSpeed compiles its operators. Removes locks of killed builds, which would block
    forever."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    for lock in folder.glob("*/lock"):
        lock.unlink()
