"""Measures AirLLM, in a separate environment.

AirLLM splits a checkpoint by layer into a folder, and reads each layer when its forward runs. Splitting is not timed.
The folder is temporary; its files are dropped from the page cache repeatedly.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from airllm import AutoModel  # pyright: ignore[reportMissingImports] - only in this worker's environment

from runtime.stream.host_memory import resident_bytes

from ..task import BenchmarkTask, Result, drop_page_cache_repeatedly
from .hugging_face import measure_generation


def generate(task: BenchmarkTask) -> Result:
    torch.set_num_threads(task.num_threads)
    baseline = resident_bytes()
    with tempfile.TemporaryDirectory(dir=Path(task.path).parent) as folder:
        streamed = AutoModel.from_pretrained(
            task.path, device="cpu", dtype=torch.float32, layer_shards_saving_path=folder
        )
        with drop_page_cache_repeatedly(Path(folder)):
            return measure_generation(streamed.model, task, baseline)


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield asdict(generate(BenchmarkTask(**question)))
