"""The benchmark of a model larger than host memory, with Weightstream and with peers that can run such a model.

A form is the model as published, or packed by `weightstream pack` in one of its formats. Forms are packed, measured and
deleted one after the other, so the disk needs space for the published model and one packed form.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import pack
from runtime.config.settings import PolicyKind
from runtime.errors import WeightstreamError
from runtime.synthesize.checkpoints import synthesize_checkpoint
from runtime.units import format_bytes

from .config import BenchConfig, Form, make_task
from .contenders import CONTENDERS, Contender, Peer
from .report import table
from .runner import gguf_path
from .task import BenchmarkTask, Measure, Result, Say, SuiteResult, task_prompts

MAX_SHARES: Mapping[Form, float] = {  # upper limit of a form's bytes, as a fraction of the published bytes
    Form.published: 1.0, Form.lossless: 0.76, Form.int8: 0.52, Form.fp8: 0.52, Form.int4: 0.29,
}  # fmt: skip
LOSS = {Form.published: "exact", Form.lossless: "lossless"}
GGUF_SHARES = {"F16": 1.0, "Q8_0": 0.54, "Q4_0": 0.29}  # the same for llama.cpp's file
OFFLOADED_SHARES = {Contender.accelerate_disk: 2.0, Contender.accelerate_disk_bf16: 1.0}  # and accelerate's copy
LAYER_PARAMETERS, OUTER_PARAMETERS = 1_451_270_144, 262_148_096  # of Mixtral 8x7B
BYTES_OF_BF16 = 2


@dataclass(frozen=True)
class FormResult:
    """The results of a form or peer, one for each round. `num_bytes`: of its weight files; of a GGUF file an estimate.
    `loss`: the entry in the column `numbers` of the table."""

    name: str
    num_bytes: int
    loss: str
    results: Sequence[Result]


def run_larger(config: BenchConfig, say: Say, measure: Measure) -> SuiteResult:
    """Measures all forms, then peers. If a peer fails, the table has the reason instead of a row. Raises
    WeightstreamError if the disk has no space for the model or Weightstream fails."""
    entries, refusals, larger = list[FormResult](), dict[str, str](), config.larger
    with _published_model(config, say) as folder:
        published = folder / Form.published.value
        for form in larger.forms:
            with _packed_form(published, form, say) as path:
                name = f"weightstream, {form.value}"
                results = _run_rounds(config, name, _make_task(config, Contender.nvme, path), say, measure)
                entries.append(FormResult(name, _num_bytes(path), LOSS.get(form, "lossy"), results))
        for peer in larger.peers:
            try:
                _require_space(published, _peer_share(published, peer), f"{peer.value}'s own copy")
                with _peer_copy(published, peer, keep_copy=larger.directory is not None):
                    results = _run_rounds(config, peer.value, _make_task(config, peer, published), say, measure)
            except WeightstreamError as error:
                refusals[peer.value] = str(error)
                say(f"{peer.value} is left out: {error}")
                continue
            kind = _gguf_kind(peer)
            num_bytes = int(_num_bytes(published) * (GGUF_SHARES[kind] if kind is not None else 1.0))
            entries.append(FormResult(peer.value, num_bytes, _peer_loss(peer), results))
    text = larger_table(entries, _prompt_tokens(config))
    text += "".join(f"\n\n{name} is left out: {why}" for name, why in refusals.items())
    return SuiteResult(
        table=text,
        rounds={entry.name: entry.results for entry in entries},
        peers=[peer.value for peer in larger.peers if peer.value not in refusals],
    )


def _run_rounds(config: BenchConfig, name: str, task: BenchmarkTask, say: Say, measure: Measure) -> list[Result]:
    results = list[Result]()
    for number in range(1, config.rounds + 1):
        results.append(measure(task))
        say(f"{name}, round {number}: {results[-1].seconds:.1f} s, prefill {results[-1].prefill_seconds:.1f} s")
    return results


def _make_task(config: BenchConfig, contender: Contender, path: Path) -> BenchmarkTask:
    """The measurement of one block with all prompts. Weightstream has the same memory budget for each form."""
    entry = CONTENDERS[contender]
    task = make_task(config, contender, str(path), config.num_prompts)
    if isinstance(entry, Peer):
        sizes = [size for size in entry.batch_sizes if size <= config.num_prompts]
        return replace(task, batch_size=task.batch_size or max(sizes, default=config.num_prompts))
    return replace(task, policy=PolicyKind.auto.value, host_memory_gib=config.larger.host_memory_gib)


@contextmanager
def _published_model(config: BenchConfig, say: Say) -> Iterator[Path]:
    """Yields the directory that has the published form. Deletes it at the end, unless `larger.directory` is set."""
    user_directory = config.larger.directory
    folder = Path(user_directory) if user_directory is not None else Path(tempfile.mkdtemp(prefix="larger-"))
    published = folder / Form.published.value
    try:
        if not (published / "config.json").exists():
            _synthesize(config, published, say)
        yield folder
    finally:
        if user_directory is None:
            shutil.rmtree(folder, ignore_errors=True)


def _synthesize(config: BenchConfig, published: Path, say: Say) -> None:
    parameters = LAYER_PARAMETERS * config.larger.num_layers + OUTER_PARAMETERS
    published.parent.mkdir(parents=True, exist_ok=True)
    overrides = dict(config.larger.architecture)
    num_bytes = 0 if overrides else parameters * BYTES_OF_BF16  # another architecture: unknown size, not checked
    _require_free_disk(published.parent, num_bytes, "the model")
    say(f"synthesizing {config.larger.num_layers} layers of Mixtral into {published}")
    synthesize_checkpoint(
        model="mixtral",
        overrides={"num_hidden_layers": config.larger.num_layers, **overrides},
        directory=published,
        dtype=torch.bfloat16,
    )


@contextmanager
def _packed_form(published: Path, form: Form, say: Say) -> Iterator[Path]:
    """Yields the directory of a form, and deletes it if it was packed here."""
    path = published.parent / form.value
    is_temporary = form is not Form.published and not (path / "config.json").exists()
    if is_temporary:
        _require_space(published, MAX_SHARES[form], f"the form {form.value}")
        say(f"packing into {path}")
        model = SourceConfig(path=str(published))
        pack(PackConfig(model=model, out=str(path), format=Format[form.value], verify=False), lambda done, total: None)
    try:
        yield path
    finally:
        if is_temporary:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _peer_copy(published: Path, peer: Contender, *, keep_copy: bool) -> Iterator[None]:
    """Deletes the peer's GGUF file at the end, unless the model is kept."""
    kind = _gguf_kind(peer)
    try:
        yield
    finally:
        if kind is not None and not keep_copy:
            gguf_path(published, kind).unlink(missing_ok=True)


def _require_space(published: Path, share: float | None, content: str) -> None:
    """Requires free disk space for `share` of the published bytes; None needs no space."""
    if share is not None:
        _require_free_disk(published.parent, int(share * _num_bytes(published)), content)


def _require_free_disk(folder: Path, num_bytes: int, content: str) -> None:
    """Raises WeightstreamError if the disk of `folder` has fewer bytes free. `content`: what needs them."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise WeightstreamError(
            f"{folder} has {format_bytes(free)} free, {content} takes {format_bytes(num_bytes)}: free disk space, set "
            "larger.directory to another disk, or reduce larger.num_layers"
        )


def _peer_share(published: Path, peer: Contender) -> float | None:
    """Disk space for the copy of the weights that the peer writes, as a fraction of the published bytes; None if it
    writes none."""
    kind = _gguf_kind(peer)
    if kind is not None:
        return None if gguf_path(published, kind).exists() else GGUF_SHARES[kind]
    return OFFLOADED_SHARES.get(peer)


def _gguf_kind(peer: Contender) -> str | None:
    entry = CONTENDERS[peer]
    isolation = entry.isolation if isinstance(entry, Peer) else None
    return None if isolation is None else isolation.gguf_kind


def _peer_loss(peer: Contender) -> str:
    """Returns `lossy` if the peer's GGUF file has fewer than 16 bits per weight, otherwise `half precision`, which
    stands for 16 bits or more."""
    kind = _gguf_kind(peer)
    return "lossy" if kind is not None and GGUF_SHARES[kind] < 1 else "half precision"


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _prompt_tokens(config: BenchConfig) -> int:
    """Tokens of all prompts, which do not depend on the vocabulary size."""
    return sum(map(len, task_prompts(_make_task(config, Contender.nvme, Path()), vocab_size=1000)))


def larger_table(entries: Sequence[FormResult], num_prompt_tokens: int) -> str:
    """A row for each form and peer. `decode, ratio` and `equal` compare the row with the first one."""
    headings = ["contender", "weights on disk", "numbers", "prefill tokens/s", "decode tokens/s, median (min-max)"]
    headings += ["decode, ratio", "all, s", "peak memory above baseline", "read per run", "equal"]
    base, reference = median(map(_decode_rate, entries[0].results)), entries[0].results[0].tokens
    return table(headings, [_row(entry, num_prompt_tokens, base, reference) for entry in entries])


def _row(entry: FormResult, num_prompt_tokens: int, base: float, reference: Sequence[list[int]]) -> list[object]:
    results, last = entry.results, entry.results[-1]
    rates, prefill = [_decode_rate(result) for result in results], median(r.prefill_seconds for r in results)
    return [
        entry.name,
        format_bytes(entry.num_bytes),
        entry.loss,
        f"{num_prompt_tokens / prefill:.1f}" if prefill else "-",
        f"{median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})",
        f"{median(rates) / base:.2f}",
        f"{median(result.seconds for result in results):.0f}",
        format_bytes(median(result.peak_bytes - result.baseline_bytes for result in results)),
        format_bytes(median(result.bytes_read for result in results)),
        f"{sum(ours == theirs for ours, theirs in zip(last.tokens, reference, strict=False))} of {len(reference)}",
    ]


def _decode_rate(result: Result) -> float:
    """Tokens per second of decode, which does not compute the first token of a sequence. If the prefill time is
    unknown, all tokens per second of the run."""
    num_tokens = sum(map(len, result.tokens))
    if not result.prefill_seconds:
        return num_tokens / result.seconds
    return (num_tokens - len(result.tokens)) / (result.seconds - result.prefill_seconds)
