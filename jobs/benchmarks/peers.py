"""What a user could pick instead of Millrace within our own environment, each as its users would run it."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from runtime.config import Tier
from runtime.stream.host_memory import resident_bytes

from .contenders import Peer
from .generation import generated
from .task import Result, Task, forgetting


def generated_by(peer: Peer, task: Task) -> Result:
    """transformers, with every decoder layer where `peer.tier` says; embeddings and head stay in memory: what users of
    accelerate get for a model that does not fit."""
    baseline, device = resident_bytes(), torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(task.path, dtype=getattr(torch, peer.dtype.value)).eval()
    if peer.tier is Tier.none:
        return generated(model, task, baseline)
    import accelerate

    if peer.tier is Tier.cpu:
        accelerate.cpu_offload(model, execution_device=device)
        return generated(model, task, baseline)
    with tempfile.TemporaryDirectory(dir=Path(task.path).parent) as folder:
        accelerate.disk_offload(model, offload_dir=folder, execution_device=device)
        with forgetting(Path(folder)):
            return generated(model, task, baseline)
