"""vLLM's CPU build, in an environment of its own.

All weights and all requests at once, as its offline users do it, with what prompts begin with cached; loading and
warming up are not timed.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.stream.host_memory import resident_bytes

from ..contenders import Peer
from ..task import Result, Task, prompts_of, timed

KV_GIB = 2
LEAST_LENGTH = 1024  # positions of a sequence


def generate(task: Task) -> Result:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] - only in this worker's environment

    baseline = resident_bytes()
    peer = task.entry
    assert isinstance(peer, Peer)
    vocab_size = json.loads((Path(task.path) / "config.json").read_text())["vocab_size"]
    ids = prompts_of(task, vocab_size)
    longest = max(map(len, ids)) + task.num_new_tokens
    model = LLM(
        model=task.path,
        dtype=peer.dtype.value,
        max_model_len=max(LEAST_LENGTH, longest),
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=task.num_new_tokens, ignore_eos=True, detokenize=False)

    def generate_all() -> dict[int, list[int]]:
        outputs = model.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)
        return {number: list(output.outputs[0].token_ids) for number, output in enumerate(outputs)}

    return timed(generate_all, baseline_bytes=baseline, batch_size=None)


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield asdict(generate(Task(**question)))
