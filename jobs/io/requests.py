"""Between rows, requests and blocks: what a row asks of the model, where the plan seats it, and what it comes to."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime.api import Rejected, Runtime
from runtime.batching.balance import Block
from runtime.engine.sequence import Completion, FinishReason, Request
from runtime.errors import DatasetError

from .dataset import Row
from .plan_file import GenerationRow, PlannedRequest


@dataclass(frozen=True, kw_only=True)
class Asked:
    """`requests` are what blocks hold positions into; every other row is in `rejected`. Both by row."""

    rows: Sequence[Row]
    requests: Sequence[Request]
    request_rows: Sequence[Row]
    rejected: Mapping[int, Rejected]  # row index -> why


def ask(runtime: Runtime, rows: Sequence[Row]) -> Asked:
    """Tokenises every row. A row that cannot be generated from is rejected, never raised."""
    requests: list[Request] = []
    request_rows: list[Row] = []
    rejected: dict[int, Rejected] = {}
    for row in rows:
        made = _request(runtime, row)
        if isinstance(made, Request):
            requests.append(made)
            request_rows.append(row)
        else:
            rejected[row.index] = made
    return Asked(rows=rows, requests=requests, request_rows=request_rows, rejected=rejected)


def _request(runtime: Runtime, row: Row) -> Request | Rejected:
    if row.error is not None:
        return Rejected(id=row.id, error=row.error)
    if row.messages is None:
        return runtime.request(row.id, row.prompt)
    tokenizer = runtime.model.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise DatasetError("dataset.chat_template=true, but the model's tokenizer has no chat template")
    text = tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return runtime.request(row.id, runtime.tokenize(text, is_rendered=True))


def seat(asked: Asked, blocks: Sequence[Block]) -> list[PlannedRequest]:
    """The plan as it is written down. Rejected rows share a block of their own behind the others."""
    planned = [
        _planned(asked.request_rows[i], block.index, micro_batch, position, len(asked.requests[i].prompt_ids))
        for block in blocks
        for micro_batch, members in enumerate(block.micro_batches)
        for position, i in enumerate(members)
    ]
    by_index = {row.index: row for row in asked.rows}
    for position, (index, why) in enumerate(asked.rejected.items()):
        planned.append(_planned(by_index[index], len(blocks), 0, position, why.num_prompt_tokens, is_rejected=True))
    return planned


def _planned(
    row: Row, block: int, micro_batch: int, position: int, num_prompt_tokens: int, *, is_rejected: bool = False
) -> PlannedRequest:
    return PlannedRequest(
        row_id=row.id,
        row_index=row.index,
        sample_index=0,
        block=block,
        micro_batch=micro_batch,
        position=position,
        num_prompt_tokens=num_prompt_tokens,
        status="rejected" if is_rejected else "planned",
    )


def unseat(planned: Iterable[PlannedRequest], asked: Asked) -> tuple[Block, ...]:
    """The blocks of a plan read back; `seat` of the result gives the plan again if the rows are the same."""
    place_of = {row.index: place for place, row in enumerate(asked.request_rows)}
    seats: dict[int, dict[int, list[int]]] = {}
    for request in planned:
        if request.status == "planned" and request.row_index in place_of:
            lanes = seats.setdefault(request.block, {})
            lanes.setdefault(request.micro_batch, []).append(place_of[request.row_index])
    return tuple(
        Block(index=index, micro_batches=tuple(tuple(members) for _, members in sorted(lanes.items())))
        for index, lanes in sorted(seats.items())
    )


def completed_row(row: Row, completion: Completion) -> GenerationRow:
    if completion.finish is FinishReason.error:
        return GenerationRow(
            id=row.id, sample_index=0, status="error", completion=completion.text, token_ids=completion.token_ids,
            error=completion.error, columns=row.columns,
        )  # fmt: skip
    return GenerationRow(
        id=row.id,
        sample_index=completion.request.sample_index,
        status="ok",
        completion=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish.value,
        columns=row.columns,
    )


def rejected_rows(asked: Asked) -> list[GenerationRow]:
    by_index = {row.index: row for row in asked.rows}
    return [
        GenerationRow(id=why.id, sample_index=0, status="error", error=why.error, columns=by_index[index].columns)
        for index, why in asked.rejected.items()
    ]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """sha256 over what turns text into tokens and back: the backend's own description, or the vocabulary, and
    template."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}\0{tokenizer.chat_template}".encode("utf-8", "surrogatepass")).hexdigest()
