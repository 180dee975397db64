"""What a user could pick instead of Millrace, each as its users would run it."""

import tempfile
from pathlib import Path
from threading import Event, Thread

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from .task import Result, Task, batches, forget_pages, prompts
from .timing import timed

FORGET_SECONDS = 0.5  # less than a step of any peer takes


def transformers(task: Task, dtype: torch.dtype = torch.float32) -> Result:
    model = AutoModelForCausalLM.from_pretrained(task.path, dtype=dtype).eval()
    return _generate(task, model)


def transformers_bf16(task: Task) -> Result:
    return transformers(task, torch.bfloat16)


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


def _generate(task: Task, model: PreTrainedModel) -> Result:
    """Batches of neighbours in length, left-padded, longest first."""
    ids = prompts(task.num_prompts, model.config.get_text_config().vocab_size, task.prompt_tokens)
    config = GenerationConfig(max_new_tokens=task.num_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)

    @torch.inference_mode()
    def generate() -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for members in batches(ids, task.batch_size):
            width = max(len(ids[i]) for i in members)
            rows = torch.tensor([[0] * (width - len(ids[i])) + ids[i] for i in members])
            mask = torch.tensor([[0] * (width - len(ids[i])) + [1] * len(ids[i]) for i in members])
            out = model.generate(rows, attention_mask=mask, generation_config=config)  # pyright: ignore[reportCallIssue]
            tokens |= {i: row[width:].tolist() for i, row in zip(members, out, strict=True)}
        return tokens

    return timed(generate)
