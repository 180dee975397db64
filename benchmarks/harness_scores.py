"""Scores a task of lm-evaluation-harness once in a separate process, with Weightstream or a transformers model.

Loading the transformers model is not timed. The checkpoint is dropped from the page cache first.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from jobs.config.settings import GenerateConfig
from jobs.record.passes import Start
from runtime.config.settings import DType, MachineConfig, ModelConfig, OffloadConfig, PolicyConfig, SharePrefixes, Tier
from runtime.library.api import Runtime
from runtime.stream.host_memory import disk_read_bytes, peak_resident_bytes, reset_peak, resident_bytes
from runtime.units import GIB

from .task import Result, drop_page_cache, drop_page_cache_repeatedly


class HarnessContender(Enum):
    """The models that are compared. `unshared` is Weightstream with share_prefixes=off; `hf` and `hf_disk` are the
    harness's transformers model in float32."""

    weightstream = "weightstream, nvme"
    unshared = "weightstream, nvme, share_prefixes=off"
    hf = "lm-eval hf, in memory"
    hf_disk = "lm-eval hf, disk offload"


@dataclass(frozen=True, kw_only=True)
class HarnessTask:
    """One measurement: the first `num_documents` documents of `task`, whose YAML is in the directory `tasks`.
    `weight_share`: host memory of Weightstream and of `hf_disk`, as a fraction of the checkpoint's bytes."""

    contender: str
    path: str
    tasks: str
    task: str
    num_documents: int
    weight_share: float
    num_threads: int
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores by document: the log-probability of each choice, and whether the right choice has the highest."""

    result: Result
    logprobs: list[list[float]]
    is_right: list[bool]

    @staticmethod
    def from_answer(answer: Mapping[str, Any]) -> "Scores":
        """Reads the JSON object that the worker wrote."""
        return Scores(**{**answer, "result": Result(**answer["result"])})


def measure(task: HarnessTask) -> Scores:
    torch.set_num_threads(task.num_threads)
    drop_page_cache(Path(task.path))
    with tempfile.TemporaryDirectory() as folder:
        if HarnessContender(task.contender) in (HarnessContender.weightstream, HarnessContender.unshared):
            return _weightstream(task, Path(folder))
        return _hugging_face(task, folder, is_offloaded=HarnessContender(task.contender) is HarnessContender.hf_disk)


def _weightstream(task: HarnessTask, folder: Path) -> Scores:
    from jobs.evaluating.harness import HarnessModel, RunAnswerer

    sharing = SharePrefixes.off if HarnessContender(task.contender) is HarnessContender.unshared else SharePrefixes.auto
    config = GenerateConfig(
        model=ModelConfig(name="hf", path=task.path, dtype=DType.float32),
        offload=OffloadConfig(tier=Tier.nvme, host_memory_gib=_host_bytes(task) / GIB),
        policy=PolicyConfig(share_prefixes=sharing),
        machine=MachineConfig(num_threads=task.num_threads),
        output_root=str(folder),
    )
    return _measure_task(
        task, lambda: HarnessModel(RunAnswerer(config, folder / "run", lambda: False, Start())), resident_bytes()
    )


def _hugging_face(task: HarnessTask, folder: str, *, is_offloaded: bool) -> Scores:
    from lm_eval.models.huggingface import HFLM

    baseline = resident_bytes()
    assert task.batch_size is not None, "set by the task or by the search"
    arguments: dict[str, Any] = {
        "pretrained": task.path,
        "device": "cpu",
        "dtype": "float32",
        "batch_size": task.batch_size,
    }
    if is_offloaded:
        arguments |= {"parallelize": True, "max_cpu_memory": _host_bytes(task), "offload_folder": folder}
    model = HFLM(**arguments)
    with drop_page_cache_repeatedly(Path(task.path)) if is_offloaded else nullcontext():
        return _measure_task(task, lambda: model, baseline)


def _host_bytes(task: HarnessTask) -> int:
    """Bytes of host memory that `weight_share` stands for."""
    config = GenerateConfig(model=ModelConfig(name="hf", path=task.path))
    return int(task.weight_share * Runtime(config.runtime).model.shape.weight_bytes)


def _measure_task(task: HarnessTask, make_model: Callable[[], Any], baseline_bytes: int) -> Scores:
    """Times the harness, with `make_model`. `baseline_bytes`: memory of the libraries, subtracted from the peak in
    tables."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task.tasks, include_defaults=False)
    read_before = disk_read_bytes()
    reset_peak()
    begin = time.monotonic()
    outcome = simple_evaluate(
        make_model(), tasks=[task.task], task_manager=manager, limit=task.num_documents, bootstrap_iters=0
    )
    seconds = time.monotonic() - begin
    assert outcome is not None, "this is the only process"
    documents = sorted(outcome.get("samples", {})[task.task], key=lambda document: document["doc_id"])
    logprobs = [[float(logprob) for logprob, _ in document["filtered_resps"]] for document in documents]
    result = Result(
        seconds=seconds,
        prefill_seconds=seconds,
        rate=sum(map(len, logprobs)) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=baseline_bytes,
        bytes_read=disk_read_bytes() - read_before,
        tokens=[],
        batch_size=task.batch_size,
    )
    return Scores(result=result, logprobs=logprobs, is_right=[bool(document["acc"]) for document in documents])


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield asdict(measure(HarnessTask(**question)))
