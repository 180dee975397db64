"""python -m tests.published_at_size DIR [FAMILY ...]: checkpoints of some 700 MiB, as the tools of others quantise
them, streamed from disk with memory for a quarter of their bytes and the keys and values beside it.

Prints for each family and format the bytes on disk, the budget, the most that the run's process took above its
baseline, and how many rows have the tokens that transformers generates with the dequantised weights in memory. Some
minutes a family; `DIR` takes 9 GiB.
"""

import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from runtime import OffloadConfig, Runtime
from runtime.config.settings import Tier
from runtime.stream.host_memory import peak_resident_bytes
from runtime.units import GIB, MIB
from tests.processes import PROCESSES
from tests.published_formats import PUBLISHED, write_published
from tests.runtime.test_families import GREEDY, config_for
from tests.support import Reference, greedy, synthesize, transformers_model

Rows = Sequence[Sequence[int]]
NUM_NEW, PROMPTS = 8, [[7 + turn, *range(5, 21)] for turn in range(8)]
FORMATS = {
    "llama": ("gptq", "bitsandbytes nf4"),
    "qwen3": ("awq", "nvfp4-pack-quantized"),
    "mixtral": ("pack-quantized", "float-quantized, rows"),
}
COMMON = {"vocab_size": 4096, "max_position_embeddings": 128}
WIDE: dict[str, dict[str, object]] = {
    "llama": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 20, "num_attention_heads": 32},
    "qwen3": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 34, "num_attention_heads": 24},
    "mixtral": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 16},
}


def generated_in_memory(directory: Path) -> Rows:
    model = transformers_model(directory)
    return [greedy(model, prompt, NUM_NEW) for prompt in PROMPTS]


def streamed(directory: Path, budget: float) -> tuple[Rows, int]:
    """Tokens, and bytes taken at most; `budget` is in GiB."""
    config = config_for(Reference(directory=directory, prompts=[], expected=[], sampled=[]), Tier.nvme)
    offload = OffloadConfig(tier=Tier.nvme, host_memory_gib=budget)
    runtime = Runtime(replace(config, offload=offload, sampling=replace(GREEDY, max_new_tokens=NUM_NEW)))
    results = runtime.generate(PROMPTS)
    rows = [list(getattr(result, "token_ids", ())) for result in results]
    return rows, peak_resident_bytes() - runtime.baseline_bytes


def kv_bytes(directory: Path) -> int:
    config = config_for(Reference(directory=directory, prompts=[], expected=[], sampled=[]), Tier.nvme)
    return Runtime(config).model.shape.kv_bytes_per_token * sum(len(prompt) + NUM_NEW for prompt in PROMPTS)


def tried(source: Path, home: Path, family: str, name: str) -> None:
    quantised, plain = write_published(source, home / "published", PUBLISHED[name])
    with ProcessPoolExecutor(1, mp_context=PROCESSES, max_tasks_per_child=1) as pool:
        stored = sum(path.stat().st_size for path in quantised.glob("*.safetensors"))
        budget = stored / 4 + pool.submit(kv_bytes, quantised).result()
        rows, most = pool.submit(streamed, quantised, budget / GIB).result()
        expected = pool.submit(generated_in_memory, plain).result()
    equal = sum(actual == reference_row for actual, reference_row in zip(rows, expected, strict=True))
    print(
        f"{family}, {name}: {stored / MIB:.0f} MiB on disk, budget {budget / MIB:.0f} MiB, at most {most / MIB:.0f} "
        f"MiB taken, {equal} of {len(rows)} rows equal",
        flush=True,
    )
    shutil.rmtree(home / "published")


if __name__ == "__main__":
    folder, *asked = sys.argv[1:]
    for each in asked or WIDE:
        made = synthesize(each, Path(folder) / each, **WIDE[each], num_key_value_heads=8, **COMMON)
        for format_name in FORMATS[each]:
            tried(made, Path(folder), each, format_name)
        shutil.rmtree(made)
