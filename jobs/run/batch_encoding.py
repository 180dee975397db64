"""What a line of an OpenAI batch has encoded: a request for each of its texts, or for each of its pairs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from runtime.config.settings import Readout
from runtime.library.api import Runtime
from runtime.model.loading import LoadedModel
from runtime.origin.net import PASS_ON, reason_of
from runtime.requests.encoding import Wanted, make_encoding
from runtime.requests.prompts import Rejected, tokenize_each
from runtime.sequences.sequence import Request

from ..datasets.rows import Inputs, Row
from .requests import Prompt

SIGMOID = "Sigmoid"


def lines_of(
    wanted: Wanted, runtime: Runtime, asked: Sequence[tuple[Row, Prompt]]
) -> Iterator[Sequence[Request | Rejected]]:
    """The requests of each line, counted by their sample index: embeddings of its texts, first and second ones of its
    pairs, or the only class of each pair where classes are `wanted`."""
    for row, _ in asked:
        assert row.inputs is not None, "what a batch has for another job is an error row"
        unfit = _unfit(runtime.model, wanted, row.inputs)
        found = [unfit] if unfit is not None else _token_ids(runtime.model, wanted, row.inputs)
        yield [_made(runtime.model, wanted, row.id, index, ids) for index, ids in enumerate(found)]


def _made(model: LoadedModel, wanted: Wanted, id: str, index: int, ids: Sequence[int] | str) -> Request | Rejected:
    made = Rejected(id=id, error=ids) if isinstance(ids, str) else make_encoding(model, id, ids, wanted)
    return replace(made, sample_index=index)


def _unfit(model: LoadedModel, wanted: Wanted, inputs: Inputs) -> str | None:
    """Why this model, asked for what is `wanted`, cannot answer such a line."""
    if wanted.readout is Readout.embedding:
        return None
    if not inputs.others:
        return "encode.output=classes reads no embeddings: encode.output=embedding does"
    config = model.staged.model.config
    if config.num_labels != 1:
        return f"a score is the one class of a ranker, and this model has {config.num_labels}"
    own = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn") or getattr(
        config, "sbert_ce_default_activation_function", None
    )
    is_sigmoid = own is None or str(own).endswith(SIGMOID)
    return None if is_sigmoid else f"the checkpoint's scores are by {own}, and here they are by {SIGMOID}"


def _token_ids(model: LoadedModel, wanted: Wanted, inputs: Inputs) -> Iterable[Sequence[int] | str]:
    """The ids of each text, or pair, or why it has none."""
    if wanted.readout is Readout.classes:
        return [_pair_ids(model, str(first), second) for first, second in inputs.pairs]
    every = [*inputs.texts, *inputs.others]
    texts = [text for text in every if isinstance(text, str)]
    found = iter(tokenize_each(model, texts, is_rendered=False, most_tokens=model.shape.context_tokens))
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
        return f"the model's tokenizer refuses the pair: {reason_of(error)}"
    if any(made.get("token_type_ids", [])):
        return "the model tells the two texts of a pair apart by token types, which are not passed on to it"
    return made["input_ids"]
