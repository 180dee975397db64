"""Measures llama.cpp through llama-cpp-python, in a separate environment.

Decodes batches of `batch_size` sequences of similar length. Products round to half precision or less, so tokens may
differ from other contenders. Loading is not timed.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.stream.host_memory import resident_bytes
from runtime.units import round_up

from ..contenders import Peer
from ..instruction_sets import Isa, restriction
from ..task import BenchmarkTask, Result, batches_by_length, drop_page_cache, measure_peer, random_prompts

BATCH_TOKENS = 512  # in a call of llama_decode: llama.cpp's default for prompts


def generate(task: BenchmarkTask) -> Result:
    import llama_cpp as lib  # pyright: ignore[reportMissingImports] - only in this worker's environment

    file = Path(task.path)
    lib.llama_backend_init()
    if restriction() is Isa.avx2 and b"AVX512 = 1" in lib.llama_print_system_info():
        raise RuntimeError("this build of llama.cpp is not restricted to AVX2")
    baseline = resident_bytes()
    model_params = lib.llama_model_default_params()
    is_mapped = isinstance(task.entry, Peer) and task.entry.is_mapped
    # The weights are loaded before, so that reading is not timed. If they do not fit, they are mapped, and reading is.
    model_params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if is_mapped else lib.LLAMA_LOAD_MODE_NONE
    model_params.use_extra_bufts = not is_mapped and _can_repack(task)  # makes repacked copies
    drop_page_cache(file)
    model = lib.llama_model_load_from_file(str(file).encode(), model_params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file}")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    ids = random_prompts(task.num_prompts, vocab_size, task.prompt_tokens)
    width = round_up(max(map(len, ids)) + task.num_new_tokens, 256)
    params = lib.llama_context_default_params()
    assert task.batch_size is not None, "set by the task or by the search"
    params.n_seq_max = min(task.batch_size, len(ids))
    params.n_ctx = width * params.n_seq_max
    params.n_batch = params.n_ubatch = max(BATCH_TOKENS, params.n_seq_max)
    params.n_threads = params.n_threads_batch = task.num_threads
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp cannot create a context of {params.n_ctx} positions")
    run = BatchDecoder(lib, context, params.n_batch, vocab_size)

    def generate_all() -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for members in batches_by_length(ids, params.n_seq_max):
            tokens |= dict(zip(members, run.generate([ids[i] for i in members], task.num_new_tokens), strict=True))
        return tokens

    result = measure_peer(generate_all, baseline_bytes=baseline, batch_size=task.batch_size)
    return replace(result, prefill_seconds=run.prefill_seconds)


def _can_repack(task: BenchmarkTask) -> bool:
    """True if weights may be repacked for llama.cpp's AMX kernels. AMX kernels for quantized weights crash: GCC 12
    removes most stores of the tile configuration that they load."""
    peer = task.entry
    return isinstance(peer, Peer) and peer.isolation is not None and peer.isolation.gguf_kind == "F16"


class BatchDecoder:
    """A llama.cpp context that decodes batches of at most `batch_tokens` tokens."""

    def __init__(self, lib: Any, context: Any, batch_tokens: int, vocab_size: int):
        self._lib, self._context, self._batch_tokens, self._vocab_size = lib, context, batch_tokens, vocab_size
        self._batch = lib.llama_batch_init(batch_tokens, 0, 1)
        self.prefill_seconds = 0.0

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int) -> list[list[int]]:
        """Generates `num_new_tokens` tokens for each prompt, greedily."""
        begin = time.monotonic()
        last: dict[int, int] = {}
        entries = [  # as in `_decode`
            (token, position, row, position + 1 == len(prompt))
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(entries), self._batch_tokens):
            last |= self._decode(entries[start : start + self._batch_tokens])
        self.prefill_seconds += time.monotonic() - begin
        tokens = [[last[row]] for row in range(len(prompts))]
        for index in range(num_new_tokens - 1):
            entries = [(tokens[row][-1], len(prompt) + index, row, True) for row, prompt in enumerate(prompts)]
            for row, token in self._decode(entries).items():
                tokens[row].append(token)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        return tokens

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Computes one batch. Returns the most likely next token by row. Each entry is a token, its position, its row,
        and True if its logits are needed."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token, position, row, needs_logits) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = row, needs_logits
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp cannot decode")
        tokens = {}
        for index, (_, _, row, needs_logits) in enumerate(entries):
            if needs_logits:
                logits = self._lib.llama_get_logits_ith(self._context, index)
                tokens[row] = int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._vocab_size,))))
        return tokens


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield asdict(generate(BenchmarkTask(**question)))
