"""Measures transformers' `generate`, on the CPU or a device, with weights in memory or offloaded."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.integrations.moe import ExpertsInterface

from runtime.config.settings import Tier
from runtime.out_of_memory import is_out_of_memory
from runtime.stream.device import ComputeDevice
from runtime.stream.host_memory import resident_bytes

from ..contenders import Peer
from ..task import BenchmarkTask, Result, batches_by_length, drop_page_cache_repeatedly, measure_peer, random_prompts

log = logging.getLogger(__name__)

GROUPED = "grouped_mm"  # transformers' default for experts, if the model's class supports it
GROUPED_IN_DECODE = "grouped_mm_in_place"  # the same kernel by a name that `generate` does not replace in decode


def generate(peer: Peer, task: BenchmarkTask) -> Result:
    """Measures a model with all decoder layers in `peer.tier`; embeddings and head stay in memory."""
    baseline, dtype = resident_bytes(), getattr(torch, peer.dtype.value)
    if peer.tier is Tier.nvme:
        return _generate_from_disk(task, dtype, baseline)
    model = AutoModelForCausalLM.from_pretrained(task.path, dtype=dtype).eval()
    if peer.tier is Tier.cpu:
        import accelerate

        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return measure_generation(model, task, baseline)


def _generate_from_disk(task: BenchmarkTask, dtype: torch.dtype, baseline_bytes: int) -> Result:
    """Measures without loading the whole model. Weights in another dtype are converted and written to a temporary
    folder by accelerate."""
    with tempfile.TemporaryDirectory(dir=Path(task.path).parent) as folder:
        model = AutoModelForCausalLM.from_pretrained(
            task.path, dtype=dtype, device_map=_layers_on_disk(Path(task.path)), offload_folder=folder
        ).eval()
        with drop_page_cache_repeatedly(Path(folder)), drop_page_cache_repeatedly(Path(task.path)):
            return measure_generation(model, task, baseline_bytes)


def _layers_on_disk(checkpoint: Path) -> dict[str, str]:
    """The `device_map` with decoder layers on disk, and all other modules in memory."""
    from runtime.probing.meta import build_meta_model

    model = build_meta_model(AutoConfig.from_pretrained(checkpoint), torch.float32)
    layers = cast("Iterable[torch.nn.Module]", model.get_decoder().layers)
    names = {module: name for name, module in model.named_modules()}
    modules = [*model.children(), *model.get_decoder().children()]
    outer = {names[module]: "cpu" for module in modules if module is not layers and module is not model.get_decoder()}
    return outer | {names[layer]: "disk" for layer in layers}


def measure_generation(model: PreTrainedModel, task: BenchmarkTask, baseline_bytes: int) -> Result:
    """Measures the task's prompts on the CPU, in batches of similar length, the longest first."""
    ids = random_prompts(task.num_prompts, model.config.get_text_config().vocab_size, task.prompt_tokens)
    size, prefill_seconds = task.batch_size, list[float]()
    assert size is not None, "set by the task or by the search"

    def generate_all() -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for members in batches_by_length(ids, size):
            begin, clock = time.monotonic(), FirstTokenClock()
            rows = generate_batch(model, [ids[i] for i in members], task.num_new_tokens, torch.device("cpu"), clock)
            prefill_seconds.append(clock.seconds - begin)
            tokens |= dict(zip(members, rows, strict=True))
        return tokens

    result = measure_peer(generate_all, baseline_bytes=baseline_bytes, batch_size=size)
    return replace(result, prefill_seconds=sum(prefill_seconds))


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    num_new_tokens: int,
    device: torch.device,
    observer: StoppingCriteria | None = None,
) -> list[list[int]]:
    """Generates greedily with left-padded prompts, ignoring the end of sequence. Returns the new tokens. Calls
    `observer` after each step."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    config = GenerationConfig(max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.generation_config = config  # else eos_token_id=None is replaced by the checkpoint's
    criteria = StoppingCriteriaList([observer] if observer is not None else [])
    out = model.generate(  # pyright: ignore[reportCallIssue]
        ids, attention_mask=mask, generation_config=config, stopping_criteria=criteria
    )
    return [row[width:].tolist() for row in out]


class DeviceModel:
    """A model that computes on a device. `num_forwards`: the forwards of the last measurement."""

    def __init__(self, model: PreTrainedModel, device: ComputeDevice):
        self._model, self._device, self.num_forwards = model, device, 0
        model.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, args: object) -> None:
        self.num_forwards += 1

    def largest_batch(self, prompts: Sequence[list[int]], free_memory: Callable[[], object]) -> int:
        """Tries to generate with all prompts, then with the longest half, quarter ..., and with each kernel for
        experts. Returns the first number of prompts that fits, and keeps its kernel. Raises an out-of-memory error if
        one prompt does not fit."""
        longest, size = sorted(prompts, key=len, reverse=True), len(prompts)
        while True:
            error = None
            for implementation in expert_implementations(self._model):
                self._model.set_experts_implementation(implementation)
                error = self._try_batch(longest[:size])
                if error is None:
                    log.warning("%d sequences fit, with the experts' kernel %s", size, implementation[""])
                    return size
                free_memory()
            if size == 1 and error is not None:
                raise error
            size //= 2

    def _try_batch(self, prompts: Sequence[list[int]]) -> Exception | None:
        """Runs a prefill and a decode pass. Returns an out-of-memory error, or None if the batch fits."""
        try:
            generate_batch(self._model, prompts, 2, self._device.torch_device)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                return error.with_traceback(None)  # frames of the traceback would keep tensors in memory
            raise
        return None

    def measure(self, prompts: Sequence[list[int]], num_new_tokens: int) -> Result:
        """Measures the time on the host, and waits for the device before both readings of the clock."""
        clock = FirstTokenClock(self._device.wait_for_compute)

        def generate_all() -> dict[int, list[int]]:
            rows = generate_batch(self._model, prompts, num_new_tokens, self._device.torch_device, clock)
            self._device.wait_for_compute()  # kernel launches are asynchronous
            return dict(enumerate(rows))

        self._device.wait_for_compute()
        begin = time.monotonic()
        self.num_forwards = 0
        result = measure_peer(generate_all, baseline_bytes=resident_bytes(), batch_size=len(prompts))
        return replace(result, prefill_seconds=clock.seconds - begin)


def expert_implementations(model: PreTrainedModel) -> Sequence[dict[str, str | None]]:
    """The kernels for experts to try, each a name by submodule.

    The first is transformers' default. If that is grouped_mm, `generate` uses another kernel in decode, which copies
    routed experts: fast for few tokens, but it needs much memory for many. So the second is grouped_mm in decode, too.
    """
    names = {GROUPED_IN_DECODE: GROUPED}
    default = {key: names.get(name or "", name) for key, name in model.get_experts_implementation().items()}
    if GROUPED not in default.values():
        return [default]
    ExpertsInterface.register(GROUPED_IN_DECODE, ExpertsInterface()[GROUPED])
    return [default, {key: GROUPED_IN_DECODE if name == GROUPED else name for key, name in default.items()}]


class FirstTokenClock(StoppingCriteria):
    """A stopping criterion that never stops. `seconds`: the time.monotonic() of the first token. `wait`: waits for the
    device before."""

    def __init__(self, wait: Callable[[], object] = lambda: None):
        self._wait, self.seconds = wait, 0.0

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - the base class declares no tensor
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.Tensor:
        if not self.seconds:
            self._wait()
            self.seconds = time.monotonic()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def build_model(path: Path, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A model with the config of a checkpoint and `tensors` as its state dict. Copies no tensor."""
    from runtime.probing.meta import build_meta_model

    model = build_meta_model(AutoConfig.from_pretrained(path), next(iter(tensors.values())).dtype)
    model.load_state_dict(tensors, strict=False, assign=True)
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert not missing, f"no weights for {missing[0]}"
    return model.eval().requires_grad_(False)


def offload_model(model: PreTrainedModel, device: ComputeDevice) -> DeviceModel:
    """Offloads with accelerate: weights stay in host memory, and are copied to the device for the forward of their
    module."""
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=device.torch_device)
    return DeviceModel(model, device)
