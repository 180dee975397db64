"""Encoding as a run's task: an embedding of each row's prompt, the classes of a classifier, or what fits its masks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa

from runtime.config.settings import Readout
from runtime.errors import require
from runtime.library.api import Runtime
from runtime.library.columns import clean_text
from runtime.library.encoding import Classified, Embedded, encoded
from runtime.requests.encoding import Wanted, make_encoding, require_readable
from runtime.requests.prompts import Rejected
from runtime.sequences.sequence import Completion, Request

from ...config.settings import EncodeConfig, EncodeSettings, run_directory
from ...datasets import Row
from ...record.output_rows import SOURCE_FIELDS
from ...record.passes import Start
from ..batch_encoding import lines_of
from ..requests import Prompt, Read, tokenized
from ..run import Outcome, perform
from .task import Task

FIRST_FIELDS = (
    pa.field("id", pa.string(), nullable=False),
    pa.field("sample_index", pa.int32(), nullable=False),  # 0: by the name that all runs have
    pa.field("status", pa.string(), nullable=False),
)
READ_FIELDS = {  # null where there is an error
    Readout.embedding: (pa.field("embedding", pa.list_(pa.float32())),),
    Readout.classes: (  # likeliest first
        pa.field("label", pa.string()),  # null where there is only one: its logit is a reward
        pa.field("labels", pa.list_(pa.string())),
        pa.field("logits", pa.list_(pa.float32())),
        pa.field("probabilities", pa.list_(pa.float64())),
    ),
    Readout.masks: (  # a list for each mask, likeliest first
        pa.field("filled_text", pa.string()),
        pa.field("mask_token_ids", pa.list_(pa.list_(pa.int32()))),
        pa.field("mask_logprobs", pa.list_(pa.list_(pa.float32()))),
    ),
}
LAST_FIELDS = (
    pa.field("num_prompt_tokens", pa.int32(), nullable=False),
    pa.field("error", pa.string()),
    pa.field("block", pa.int32(), nullable=False),
    pa.field("micro_batch", pa.int32(), nullable=False),
    *SOURCE_FIELDS,
)


def encode_schema(readout: Readout) -> pa.Schema:
    """`generation_schema`, of a run that encodes."""
    return pa.schema([*FIRST_FIELDS, *READ_FIELDS[readout], *LAST_FIELDS])


def encode(config: EncodeConfig, should_stop: Callable[[], bool], start: Start | None = None) -> Outcome:
    """`perform`, for what is read off prompts."""
    return perform(*encoding(config), should_stop, start)


def encoding(config: EncodeConfig) -> tuple[Task, EncodeConfig]:
    """A row for each prompt, and the settings that this takes. Nothing is kept of a block that was stopped inside,
    which begins anew: checkpoints have no place for what was read. Vectors of an OpenAI batch have length 1, as
    OpenAI's have."""
    settings = config.encode
    wanted = Wanted(
        readout=settings.output,
        pooling=settings.pooling,
        normalize=settings.normalize or (config.is_batch and settings.output is Readout.embedding),
        num_top=settings.num_top if settings.output is Readout.masks else 1,
    )
    task = Task(
        directory=run_directory(config),
        columns=lambda _: encode_schema(settings.output),
        requests=partial(lines_of if config.is_batch else encodings_of, wanted),
        check=partial(_check, wanted),
        read=lambda runtime: _reader(settings, wanted, runtime),
    )
    return task, replace(config, checkpoint_seconds=None)


def encodings_of(
    wanted: Wanted, runtime: Runtime, asked: Sequence[tuple[Row, Prompt]]
) -> Iterable[Sequence[Request | Rejected]]:
    """The request for what is `wanted` of each prompt."""
    for row, ids in tokenized(runtime, asked, runtime.model.shape.context_tokens):
        if isinstance(ids, str):
            yield [Rejected(id=row.id, error=ids)]
        else:
            yield [make_encoding(runtime.model, row.id, ids, wanted)]


def _check(wanted: Wanted, runtime: Runtime) -> None:
    require_readable(runtime.model, wanted)
    most = runtime.model.shape.vocab_size
    require(wanted.num_top <= most, f"encode.num_top={wanted.num_top:,} is above the model's {most:,} tokens")


def _reader(settings: EncodeSettings, wanted: Wanted, runtime: Runtime) -> Read:
    def read(completion: Completion) -> Mapping[str, object]:
        found = encoded(runtime.model, wanted, 0, completion)
        if isinstance(found, Embedded):
            return {"embedding": found.vector.tolist()}
        if isinstance(found, Classified):
            return _likeliest(found, settings.num_top)
        return {
            "filled_text": clean_text(found.text),
            "mask_token_ids": [list(ids) for ids in found.token_ids],
            "mask_logprobs": [list(values) for values in found.logprobs],
        }

    return read


def _likeliest(found: Classified, num_top: int) -> Mapping[str, object]:
    order = sorted(range(len(found.logits)), key=lambda place: -found.logits[place])[:num_top]
    return {
        "label": found.label,
        "labels": [found.labels[place] for place in order],
        "logits": [found.logits[place] for place in order],
        "probabilities": [found.probabilities[place] for place in order],
    }
