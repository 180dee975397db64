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
from ..requests import Prompt, tokenize_prompts
from ..run import Outcome, run_task
from .task import Task

SIGMOID = "Sigmoid"


def batch_line_requests(
    wanted: EncodingSpec, runtime: Runtime, prompts: Sequence[tuple[Row, Prompt]]
) -> Iterator[Sequence[Request | Rejected]]:
    """The requests of each batch line, numbered by sample index: embeddings of its texts or of the first and second
    texts of its pairs, or the score of each pair if classes are `wanted`."""
    for row, _ in prompts:
        assert row.inputs is not None, "what a batch has for another job is an error row"
        problem = _line_problem(runtime.model, wanted, row.inputs)
        token_ids = [problem] if problem is not None else _token_ids(runtime.model, wanted, row.inputs)
        requests = [_encoding_request(runtime.model, wanted, row.id, ids) for ids in token_ids]
        yield [replace(each, sample_index=index) for index, each in enumerate(requests)]


def _encoding_request(
    model: LoadedModel, wanted: EncodingSpec, id: str, ids: Sequence[int] | str
) -> Request | Rejected:
    return Rejected(id=id, error=ids) if isinstance(ids, str) else make_encoding(model, id, ids, wanted)


def _line_problem(model: LoadedModel, wanted: EncodingSpec, inputs: EncodeInputs) -> str | None:
    """The reason this model cannot answer such a line; None if it can."""
    if wanted.readout is Readout.embedding:
        return None
    if not inputs.second_texts:
        return "encode.output=classes reads no embeddings: encode.output=embedding does"
    config = model.staged.model.config
    if config.num_labels != 1:
        return f"a score is the one class of a ranker, and this model has {config.num_labels}"
    activation = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn") or getattr(
        config, "sbert_ce_default_activation_function", None
    )
    is_sigmoid = activation is None or str(activation).endswith(SIGMOID)
    return None if is_sigmoid else f"the checkpoint's scores are by {activation}, and here they are by {SIGMOID}"


def _token_ids(model: LoadedModel, wanted: EncodingSpec, inputs: EncodeInputs) -> Iterable[Sequence[int] | str]:
    """The token ids of each text or pair, or an error message."""
    if wanted.readout is Readout.classes:
        return [_pair_ids(model, str(first), second) for first, second in inputs.pairs]
    every = [*inputs.texts, *inputs.second_texts]
    texts = [text for text in every if isinstance(text, str)]
    found = iter(tokenize_each(model, texts, is_rendered=False, max_tokens=model.shape.context_tokens))
    return [next(found) if isinstance(text, str) else text for text in every]


def _pair_ids(model: LoadedModel, first: str, second: str) -> Sequence[int] | str:
    """Both texts as the tokenizer puts them into one."""
    if model.tokenizer is None:
        return "texts need a tokenizer: set model.tokenizer"
    try:
        made = model.tokenizer(first, second)
    except PASS_ON:
        raise
    except BaseException as error:
        return f"the model's tokenizer refuses the pair: {short_reason(error)}"
    if any(made.get("token_type_ids", [])):
        return "the model tells the two texts of a pair apart by token types, which are not passed on to it"
    return made["input_ids"]


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
    """The output schema of an encoding run."""
    return pa.schema([*FIRST_FIELDS, *READ_FIELDS[readout], *LAST_FIELDS])


def encode(config: EncodeConfig, should_stop: Callable[[], bool], start: Start | None = None) -> Outcome:
    """Runs the encoding task; see `run_task`."""
    return run_task(*encoding_task(config), should_stop, start)


def encoding_task(config: EncodeConfig) -> tuple[Task, EncodeConfig]:
    """The task, with an output row for each prompt, and adjusted settings: no checkpoints, so an interrupted block
    restarts. Embeddings of an OpenAI batch are normalized, as OpenAI's are."""
    settings = config.encode
    wanted = EncodingSpec(
        readout=settings.output,
        pooling=settings.pooling,
        normalize=settings.normalize or (config.is_batch and settings.output is Readout.embedding),
        num_top=settings.num_top if settings.output is Readout.masks else 1,
    )

    def check(runtime: Runtime) -> None:
        require_readable(runtime.model, wanted)
        most = runtime.model.shape.vocab_size
        require(wanted.num_top <= most, f"encode.num_top={wanted.num_top:,} is above the model's {most:,} tokens")

    task = Task(
        directory=run_directory(config),
        columns=lambda _: encode_schema(settings.output),
        requests=partial(batch_line_requests if config.is_batch else encoding_requests, wanted),
        check=check,
        make_reader=lambda runtime: partial(_read_columns, settings.num_top, wanted, runtime.model),
    )
    return task, replace(config, checkpoint_seconds=None)


def encoding_requests(
    wanted: EncodingSpec, runtime: Runtime, prompts: Sequence[tuple[Row, Prompt]]
) -> Iterable[Sequence[Request | Rejected]]:
    """The request for what is `wanted` of each prompt."""
    for row, ids in tokenize_prompts(runtime, prompts, runtime.model.shape.context_tokens):
        yield [_encoding_request(runtime.model, wanted, row.id, ids)]


def _read_columns(
    num_top: int, wanted: EncodingSpec, model: LoadedModel, completion: Completion
) -> Mapping[str, object]:
    """The output columns of an make_result prompt."""
    result = make_result(model, wanted, 0, completion)
    if isinstance(result, Embedded):
        return {"embedding": result.vector.tolist()}
    if isinstance(result, Classified):
        order = sorted(range(len(result.logits)), key=lambda place: -result.logits[place])[:num_top]
        return {
            "label": result.label,
            "labels": [result.labels[place] for place in order],
            "logits": [result.logits[place] for place in order],
            "probabilities": [result.probabilities[place] for place in order],
        }
    return {
        "filled_text": clean_text(result.text),
        "mask_token_ids": [list(ids) for ids in result.token_ids],
        "mask_logprobs": [list(values) for values in result.logprobs],
    }
