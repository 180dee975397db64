"""Generation with transformers' own `generate`, for all peers that are a transformers model in some disguise."""

import torch
from transformers import GenerationConfig, PreTrainedModel

from .task import Result, Task, batches, prompts
from .timing import timed


def generated(model: PreTrainedModel, task: Task, baseline_bytes: int) -> Result:
    """Greedy, past the end-of-sequence token; batches of neighbours in length, left-padded, longest first."""
    ids = prompts(task.num_prompts, model.config.get_text_config().vocab_size, task.prompt_tokens)
    config = GenerationConfig(max_new_tokens=task.num_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.generation_config = config  # or the checkpoint's end-of-sequence token takes the place of None
    size = task.batch_size
    assert size is not None, "given, or searched before"

    @torch.inference_mode()
    def generate() -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for members in batches(ids, size):
            width = max(len(ids[i]) for i in members)
            rows = torch.tensor([[0] * (width - len(ids[i])) + ids[i] for i in members])
            mask = torch.tensor([[0] * (width - len(ids[i])) + [1] * len(ids[i]) for i in members])
            out = model.generate(rows, attention_mask=mask, generation_config=config)  # pyright: ignore[reportCallIssue]
            tokens |= {i: row[width:].tolist() for i, row in zip(members, out, strict=True)}
        return tokens

    return timed(generate, baseline_bytes=baseline_bytes, batch_size=size)
