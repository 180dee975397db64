"""Models of transformers over drawn weights: held by the device, or offloaded by accelerate or DeepSpeed.

A peer gets batches as large as its memory allows, and is measured on one: the next would go as the first.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from runtime.out_of_memory import is_out_of_memory
from runtime.probing.meta import build_meta_model
from runtime.stream.device import ComputeDevice
from runtime.stream.host_memory import resident_bytes

from ..task import Result
from ..timing import timed
from .memory import start_anew


class PeerModel:
    """`num_forwards`: of the last measurement, or since."""

    def __init__(self, model: PreTrainedModel, device: ComputeDevice):
        self.model, self._device, self.num_forwards = model, device, 0
        model.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, args: object) -> None:
        self.num_forwards += 1

    def fitting(self, prompts: Sequence[list[int]]) -> int:
        """Sequences: all, half of them, a quarter ... the most whose longest prompts go through; trying warms up too.
        Raises what one alone raises."""
        longest, size = sorted(prompts, key=len, reverse=True), len(prompts)
        while not self._goes_through(longest[:size]):
            start_anew(self._device)
            size //= 2
        return size

    def _goes_through(self, prompts: Sequence[list[int]]) -> bool:
        try:
            self.run(prompts, 1)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error) and len(prompts) > 1:
                return False
            raise
        return True

    def measure(self, prompts: Sequence[list[int]], num_new_tokens: int) -> Result:
        """Host seconds, between which the device is waited for."""
        clock = _FirstToken(self._device)

        def generate() -> dict[int, list[int]]:
            rows = self.run(prompts, num_new_tokens, clock)
            self._device.finish()
            return dict(enumerate(rows))

        self._device.finish()
        begin = time.monotonic()
        self.num_forwards = 0
        result = timed(generate, baseline_bytes=resident_bytes(), batch_size=len(prompts))
        return replace(result, prefill_seconds=clock.seconds - begin)

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[list[int]], num_new_tokens: int, clock: StoppingCriteria | None = None
    ) -> list[list[int]]:
        """New tokens of left-padded prompts."""
        width, place = max(map(len, prompts)), self._device.torch_device
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=place)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=place)
        config = GenerationConfig(max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
        self.model.generation_config = config  # or the checkpoint's end of sequence takes the place of None
        criteria = StoppingCriteriaList([clock] if clock is not None else [])
        out = self.model.generate(  # pyright: ignore[reportCallIssue]
            ids, attention_mask=mask, generation_config=config, stopping_criteria=criteria
        )
        return [row[width:].tolist() for row in out]


class _FirstToken(StoppingCriteria):
    """Stops nobody; remembers when the first tokens were there."""

    def __init__(self, device: ComputeDevice):
        self._device, self.seconds = device, 0.0

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - it promises a class that no tensor has
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.Tensor:
        if not self.seconds:
            self._device.finish()
            self.seconds = time.monotonic()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def model_of(path: Path, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """With these tensors as its weights, by the names of its state dict; no copy."""
    model = build_meta_model(AutoConfig.from_pretrained(path), next(iter(tensors.values())).dtype)
    model.load_state_dict(tensors, strict=False, assign=True)
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert not missing, f"nothing was drawn for {missing[0]}"
    return model.eval().requires_grad_(False)


def accelerated(model: PreTrainedModel, device: ComputeDevice) -> PeerModel:
    """Its weights stay where they are; a module's come to the device for the module's forward."""
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=device.torch_device)
    return PeerModel(model, device)


def partitioned(model: PreTrainedModel, device: ComputeDevice) -> PeerModel:
    """By DeepSpeed's ZeRO stage 3, which copies its weights to pinned memory and fetches them ahead of the forward."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    layer_elements = sum(p.numel() for name, p in model.named_parameters() if ".layers.0." in name)
    settings = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_max_live_parameters": 2 * layer_elements,
            "stage3_prefetch_bucket_size": layer_elements,
            "stage3_param_persistence_threshold": 0,
        },
        "train_micro_batch_size_per_gpu": 1,
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.module.eval()
    return PeerModel(engine.module, device)
