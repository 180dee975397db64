"""Encoding as a run's task: an embedding of each prompt, the classes of a classifier, or the tokens of its masks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa

from runtime.checkpoint_source.download import PASS_ON, short_reason
from runtime.config.settings import Readout
from runtime.errors import require
from runtime.library.api import Runtime
from runtime.library.columns import clean_text
from runtime.library.encoding import Classified, Embedded, make_result
from runtime.model.loading import LoadedModel
from runtime.requests.encoding import EncodingSpec, make_encoding, require_readable
from runtime.requests.prompts import Rejected, tokenize_each
from runtime.sequences.sequence import Completion, Request

from ...config.settings import EncodeConfig, run_directory
from ...datasets.rows import EncodeInputs, Row
from ...record.output_rows import SOURCE_FIELDS
from ...record.passes import Start
from ...record.summary import Outcome
from ..requests import Prompt, tokenize_prompts
from ..run import run_task
from .task import Task

SIGMOID = "Sigmoid"


def batch_line_requests(
    spec: EncodingSpec, runtime: Runtime, prompts: Sequence[tuple[Row, Prompt]]
) -> Iterator[Sequence[Request | Rejected]]:
    """The requests of each batch line, numbered by sample index. With `Readout.embedding`, there is one for each text,
    including second texts; with `Readout.classes`, one for each pair, to score it."""
    for row, _ in prompts:
        assert row.inputs is not None, "lines for other endpoints are error rows"
        problem = _line_problem(runtime.model, spec, row.inputs)
        ids_or_errors = [problem] if problem is not None else _ids_or_errors(runtime.model, spec, row.inputs)
        requests = [_encoding_request(runtime.model, spec, row.id, each) for each in ids_or_errors]
        yield [replace(request, sample_index=index) for index, request in enumerate(requests)]


def _encoding_request(
    model: LoadedModel, spec: EncodingSpec, id: str, ids_or_error: Sequence[int] | str
) -> Request | Rejected:
    """Makes a request from token ids, or a rejected one from an error message."""
    if isinstance(ids_or_error, str):
        return Rejected(id=id, error=ids_or_error)
    return make_encoding(model, id, ids_or_error, spec)


def _line_problem(model: LoadedModel, spec: EncodingSpec, inputs: EncodeInputs) -> str | None:
    """The reason why the model cannot answer the line; None if it can."""
    if spec.readout is Readout.embedding:
        return None
    if not inputs.second_texts:
        return "encode.output=classes gives no embeddings: set encode.output=embedding"
    config = model.staged.model.config
    if config.num_labels != 1:
        return f"scores need a reranker with one class, and this model has {config.num_labels}"
    activation = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn") or getattr(
        config, "sbert_ce_default_activation_function", None
    )
    is_sigmoid = activation is None or str(activation).endswith(SIGMOID)
    return None if is_sigmoid else f"the checkpoint's scores use {activation}; only {SIGMOID} is supported"


def _ids_or_errors(model: LoadedModel, spec: EncodingSpec, inputs: EncodeInputs) -> Iterable[Sequence[int] | str]:
    """The token ids of each text or pair of a batch line, or an error message in place of them."""
    if spec.readout is Readout.classes:  # texts of pairs are strings, never token ids: `str` is for the type checker
        return [_pair_ids(model, str(first), second) for first, second in inputs.pairs]
    inputs_in_order = [*inputs.texts, *inputs.second_texts]
    texts = [text for text in inputs_in_order if isinstance(text, str)]
    token_ids = iter(tokenize_each(model, texts, is_rendered=False, max_tokens=model.shape.context_tokens))
    return [next(token_ids) if isinstance(text, str) else text for text in inputs_in_order]


def _pair_ids(model: LoadedModel, first: str, second: str) -> Sequence[int] | str:
    """Token ids of both texts, joined by the tokenizer, or an error message."""
    if model.tokenizer is None:
        return "texts need a tokenizer: set model.tokenizer"
    try:
        encoded = model.tokenizer(first, second)
    except PASS_ON:
        raise
    except BaseException as error:
        return f"the model's tokenizer cannot encode the pair: {short_reason(error)}"
    if any(encoded.get("token_type_ids", [])):
        return "the model needs token types for the two texts of a pair, which are not supported"
    return encoded["input_ids"]


FIRST_FIELDS = (
    pa.field("id", pa.string(), nullable=False),
    pa.field("sample_index", pa.int32(), nullable=False),  # of an input in its batch line; 0 in other runs
    pa.field("status", pa.string(), nullable=False),
)
READ_FIELDS = {  # null in error rows
    Readout.embedding: (pa.field("embedding", pa.list_(pa.float32())),),
    Readout.classes: (  # most likely first
        pa.field("label", pa.string()),  # null for a reward model, which has one class
        pa.field("labels", pa.list_(pa.string())),
        pa.field("logits", pa.list_(pa.float32())),
        pa.field("probabilities", pa.list_(pa.float64())),
    ),
    Readout.masks: (  # a list for each mask, most likely first
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
    return pa.schema([*FIRST_FIELDS, *READ_FIELDS[readout], *LAST_FIELDS])


def encode(config: EncodeConfig, should_stop: Callable[[], bool], start: Start | None = None) -> Outcome:
    """Runs the encoding task; see `run_task`."""
    return run_task(*encoding_task(config), should_stop, start)


def encoding_task(config: EncodeConfig) -> tuple[Task, EncodeConfig]:
    """The task, which has an output row for each prompt, and its settings. The progress of a block is never saved
    (`checkpoint_seconds=None`), so an interrupted block restarts. Embeddings of an OpenAI batch are normalized."""
    settings = config.encode
    spec = EncodingSpec(
        readout=settings.output,
        pooling=settings.pooling,
        normalize=settings.normalize or (config.is_batch and settings.output is Readout.embedding),
        num_top=settings.num_top if settings.output is Readout.masks else 1,
    )

    def check(runtime: Runtime) -> None:
        require_readable(runtime.model, spec)
        size = runtime.model.shape.vocab_size
        require(spec.num_top <= size, f"encode.num_top={spec.num_top:,} exceeds the vocabulary size of {size:,}")

    task = Task(
        directory=run_directory(config),
        columns=lambda _: encode_schema(settings.output),
        requests=partial(batch_line_requests if config.is_batch else encoding_requests, spec),
        check=check,
        make_reader=lambda runtime: partial(_encoding_columns, settings.num_top, spec, runtime.model),
    )
    return task, replace(config, checkpoint_seconds=None)


def encoding_requests(
    spec: EncodingSpec, runtime: Runtime, prompts: Sequence[tuple[Row, Prompt]]
) -> Iterable[Sequence[Request | Rejected]]:
    """The encoding request of each prompt."""
    for row, ids in tokenize_prompts(runtime, prompts, runtime.model.shape.context_tokens):
        yield [_encoding_request(runtime.model, spec, row.id, ids)]


def _encoding_columns(
    num_classes: int, spec: EncodingSpec, model: LoadedModel, completion: Completion
) -> Mapping[str, object]:
    """Output columns of a finished encoding. `num_classes`: most classes to write; `spec.num_top` limits the tokens of
    a mask only."""
    result = make_result(model, spec, 0, completion)
    if isinstance(result, Embedded):
        return {"embedding": result.vector.tolist()}
    if isinstance(result, Classified):
        order = sorted(range(len(result.logits)), key=lambda label: -result.logits[label])[:num_classes]
        return {
            "label": result.label,
            "labels": [result.labels[label] for label in order],
            "logits": [result.logits[label] for label in order],
            "probabilities": [result.probabilities[label] for label in order],
        }
    return {
        "filled_text": clean_text(result.text),
        "mask_token_ids": [list(ids) for ids in result.token_ids],
        "mask_logprobs": [list(values) for values in result.logprobs],
    }
