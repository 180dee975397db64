"""What a user could pick instead of Millrace, each as its users would run it."""

import tempfile
import time
from pathlib import Path
from threading import Event, Thread

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from runtime.stream.host_memory import disk_read_bytes, peak_resident_bytes, reset_peak, resident_bytes

from .task import Result, Task, forget_pages, prompts

FORGET_SECONDS = 0.5  # less than a step of any peer takes


def transformers(task: Task) -> Result:
    model = AutoModelForCausalLM.from_pretrained(task.path, dtype=torch.float32).eval()
    return _generate(task, model)


def accelerate(task: Task) -> Result:
    """Every decoder layer on disk, embeddings and head in memory: what its users get for a model that does not fit.
    Nor would such a model stay in the page cache from one step to the next, so its pages are dropped all along."""
    from accelerate import disk_offload

    with tempfile.TemporaryDirectory(dir=Path(task.path).parent) as folder:
        model = AutoModelForCausalLM.from_pretrained(task.path, dtype=torch.float32).eval()
        disk_offload(model, offload_dir=folder, execution_device=torch.device("cpu"))
        is_done = Event()
        cleaner = Thread(target=_forget_until, args=(is_done, Path(folder)))
        cleaner.start()
        try:
            return _generate(task, model)
        finally:
            is_done.set()
            cleaner.join()


def _forget_until(is_done: Event, directory: Path) -> None:
    while not is_done.wait(FORGET_SECONDS):
        forget_pages(directory)


@torch.inference_mode()
def _generate(task: Task, model: PreTrainedModel) -> Result:
    """Batches of neighbours in length, left-padded, longest first."""
    ids = prompts(task.num_prompts, model.config.get_text_config().vocab_size, task.prompt_tokens)
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    config = GenerationConfig(max_new_tokens=task.num_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    tokens: dict[int, list[int]] = {}
    baseline, read_before = resident_bytes(), disk_read_bytes()
    reset_peak()
    begin = time.monotonic()
    for start in range(0, len(order), task.batch_size):
        members = order[start : start + task.batch_size]
        width = max(len(ids[i]) for i in members)
        rows = torch.tensor([[0] * (width - len(ids[i])) + ids[i] for i in members])
        mask = torch.tensor([[0] * (width - len(ids[i])) + [1] * len(ids[i]) for i in members])
        out = model.generate(rows, attention_mask=mask, generation_config=config)  # pyright: ignore[reportCallIssue]
        tokens |= {i: row[width:].tolist() for i, row in zip(members, out, strict=True)}
    seconds = time.monotonic() - begin
    return Result(
        seconds=seconds,
        prefill_seconds=0.0,
        rate=sum(map(len, tokens.values())) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=baseline,
        bytes_read=disk_read_bytes() - read_before,
        tokens=[tokens[i] for i in sorted(tokens)],
    )
