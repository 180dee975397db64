"""Measures vLLM's CPU build, in a separate environment, with prefix caching. Loading and warm-up are not timed."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.stream.host_memory import resident_bytes

from ..contenders import Peer
from ..instruction_sets import Isa, restriction
from ..task import BenchmarkTask, Result, measure_peer, task_prompts

KV_GIB = 2
MIN_LENGTH = 1024  # of max_model_len, in positions
LIBRARY = re.compile(r"/vllm/(_C\w*)\.\S*so\s*$", re.MULTILINE)  # vLLM's libraries in /proc/PID/maps


def generate(task: BenchmarkTask) -> Result:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    isa = restriction()
    if isa is not None:
        import torch

        hide_wider_instructions(isa, torch.cpu)
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] - only in this worker's environment

    baseline = resident_bytes()
    peer = task.entry
    assert isinstance(peer, Peer)
    vocab_size = json.loads((Path(task.path) / "config.json").read_text())["vocab_size"]
    ids = task_prompts(task, vocab_size)
    longest = max(map(len, ids)) + task.num_new_tokens
    model = LLM(
        model=task.path,
        dtype=peer.dtype.value,
        max_model_len=max(MIN_LENGTH, longest),
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    if isa is Isa.avx2 and (loaded := set(LIBRARY.findall(Path("/proc/self/maps").read_text()))) != {"_C_AVX2"}:
        raise RuntimeError(f"vLLM is not restricted to AVX2: it loaded {', '.join(sorted(loaded)) or 'no library'}")
    sampling = SamplingParams(temperature=0.0, max_tokens=task.num_new_tokens, ignore_eos=True, detokenize=False)

    def generate_all() -> dict[int, list[int]]:
        outputs = model.generate([{"prompt_token_ids": prompt} for prompt in ids], sampling, use_tqdm=False)
        return {number: list(output.outputs[0].token_ids) for number, output in enumerate(outputs)}

    return measure_peer(generate_all, baseline_bytes=baseline, batch_size=None)


def hide_wider_instructions(isa: Isa, torch_cpu: Any) -> None:
    """Restricts vLLM to this instruction set. vLLM chooses its library (_C for AVX512-BF16 and AMX, _C_AVX512, _C_AVX2)
    by functions of torch.cpu. They ignore variables such as ATEN_CPU_CAPABILITY, and are replaced here."""
    hidden = ["_is_amx_tile_supported", "_is_amx_fp16_supported"]
    if isa is Isa.avx2:
        hidden += ["_is_avx512_supported", "_is_avx512_bf16_supported", "_is_vnni_supported"]
    for name in hidden:
        getattr(torch_cpu, name)  # AttributeError if this torch renamed it
        setattr(torch_cpu, name, lambda: False)


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield asdict(generate(BenchmarkTask(**question)))
