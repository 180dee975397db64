"""Conversions: rows to requests, plans to blocks, completions to output rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime.batching.balance import Block
from runtime.errors import ConfigError, require
from runtime.library.api import Runtime
from runtime.requests.chat import ChatRenderer, TemplateRefusal
from runtime.requests.joining import JoinedRequest, add_hidden_beams, join_requests, member_scores, with_hidden_beams
from runtime.requests.prompts import Rejected, tokenize_each
from runtime.sequences.sequence import Completion, Request

from ..datasets import DatasetConfig, Row
from ..datasets.fields import MAX_ROWS
from ..datasets.records import shorten
from ..record.output_rows import GenerationRow
from ..record.plan_file import PlannedRequest, RowSlot

QUESTION = {"role": "user", "content": "?"}


def make_renderer(tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
    """A chat renderer whose errors name the data set's key."""
    return ChatRenderer(tokenizer, purpose="dataset.chat_template=true", alternative="set dataset.chat_template=false")


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    return tokenizer is not None and bool(tokenizer.chat_template)


def require_template(
    tokenizer: PreTrainedTokenizerBase | None, config: DatasetConfig, rows: Sequence[Row] = ()
) -> None:
    """Raises ConfigError if chats need a template and there is none, or if the template rejects
    `dataset.system_prompt` or all of `rows`."""
    are_chats = [row.messages is not None for row in rows if row.error is None]
    if not (config.chat_template or any(are_chats)):
        return
    if not has_template(tokenizer):
        if config.chat_template or all(are_chats):
            why = "dataset.chat_template=true" if config.chat_template else "the rows are chats"
            raise ConfigError(f"{why}, but the model's tokenizer has no chat template")
        return
    assert tokenizer is not None, "it has a template"
    with make_renderer(tokenizer) as renderer:
        if config.system_prompt is not None and not rows:
            chat = [{"role": "system", "content": config.system_prompt}, QUESTION]
            try:
                renderer.render(chat, config.chat_template_kwargs)
            except TemplateRefusal as error:
                raise ConfigError(
                    f"dataset.system_prompt is set, but the model's chat template takes no system message ({error}): "
                    "set it to null, or put its text into the prompts"
                ) from error
        _require_renders(renderer, [row for row in rows if row.error is None])


def _require_renders(renderer: ChatRenderer, rows: Sequence[Row]) -> None:
    """Raises ConfigError if the template fails for all rows with the same error."""
    first: str | None = None
    chats = [(row.messages, row.template_kwargs) for row in rows if row.messages is not None]
    # A single chat may itself be invalid, so a plain question is tried too.
    for messages, template_kwargs in [*chats, *([([QUESTION], chats[0][1])] if len(chats) == 1 else [])]:
        try:
            renderer.render(messages, template_kwargs)
            return
        except TemplateRefusal as error:
            if first is not None and str(error) != first:
                return
            first = str(error)
    if first is not None:
        raise ConfigError(
            f"dataset.chat_template=true, but the model's chat template fails for all {len(chats):,} rows: {first}; "
            "fix the template, or set dataset.chat_template=false"
        )


Prompt: TypeAlias = str | tuple[int, ...]  # text, rendered by the template for a chat, or token ids
# Returns the requests of each row, in order, or the reason why a row has none.
MakeRequests: TypeAlias = Callable[[Runtime, Sequence[tuple[Row, Prompt]]], Iterable[Sequence[Request | Rejected]]]
ReadColumns: TypeAlias = Callable[[Completion], Mapping[str, object]]  # output columns of an encoding
CHUNK_ROWS, CHUNK_CHARACTERS = 1024, 1 << 20  # tokenized together; a tokenizer needs 200 bytes per character


@dataclass(frozen=True, kw_only=True)
class RequestBatch:
    """Requests of a list of input rows, `requests` to compute and `rejected` ones, each with its input row and in input
    order. `slots`: slots in an existing plan, by request key; requests with different slots are not joined.
    `read_columns`: converts an encoding to output columns."""

    requests: Sequence[Request]
    request_rows: Sequence[Row]
    rejected: Sequence[Rejected]
    rejected_rows: Sequence[Row]
    slots: Mapping[tuple[str, int], RowSlot] = field(default_factory=dict)
    read_columns: ReadColumns = lambda _: {}

    @cached_property
    def joined(self) -> Sequence[JoinedRequest]:
        """Distinct computations, each for one or more `members`, which are positions in `requests`. Blocks contain
        positions in this list."""
        return list(
            add_hidden_beams(join_requests(self.requests, [self.slots.get(request.key) for request in self.requests]))
        )

    @cached_property
    def computed(self) -> Sequence[Request]:
        """The requests of `joined`."""
        return [joined.request for joined in self.joined]

    def with_plan_slots(self, planned: Iterable[PlannedRequest]) -> "RequestBatch":
        """This batch with requests joined as in an existing plan."""
        return replace(self, slots={request.key: request.slot for request in planned})


def completion_requests(
    runtime: Runtime, prompts: Sequence[tuple[Row, Prompt]]
) -> Iterator[Sequence[Request | Rejected]]:
    """The requests for `n` completions of each prompt."""
    limits = {runtime.config.sampling.max_new_tokens, *(row.overrides.max_new_tokens for row, _ in prompts)}
    max_tokens = None if 0 in limits else runtime.model.shape.context_tokens
    for row, ids in tokenize_prompts(runtime, prompts, max_tokens):
        failed = Rejected(id=row.id, error=ids) if isinstance(ids, str) else None
        request = failed or runtime.request(row.id, () if isinstance(ids, str) else ids, overrides=row.overrides)
        yield runtime.samples(request, row.overrides.n)


def tokenize_prompts(
    runtime: Runtime, prompts: Sequence[tuple[Row, Prompt]], max_tokens: int | None
) -> Iterator[tuple[Row, Sequence[int] | str]]:
    """Yields each row with the token ids of its prompt, or with an error message."""
    token_ids = {}
    for is_chat in (False, True):
        texts = [text for row, text in prompts if isinstance(text, str) and (row.messages is not None) == is_chat]
        token_ids[is_chat] = iter(tokenize_each(runtime.model, texts, is_rendered=is_chat, max_tokens=max_tokens))
    for row, text in prompts:
        yield row, next(token_ids[row.messages is not None]) if isinstance(text, str) else text


def make_batch(
    runtime: Runtime, rows: Sequence[Row], make_requests: MakeRequests, renderer: ChatRenderer | None = None
) -> RequestBatch:
    """Tokenizes all rows and makes their requests; rows that fail become rejected ones. `renderer`: one that stays
    open; None opens one if rows are chats, which takes seconds. Raises ConfigError for more than `MAX_ROWS`
    requests."""
    num_samples = runtime.config.sampling.n
    counts = [num_samples if row.overrides.n is None else row.overrides.n for row in rows]
    if sum(counts) > MAX_ROWS:
        largest = counts.index(max(counts))
        raise ConfigError(
            f"sampling.n={num_samples:,}, or the rows' own n, gives {sum(counts):,} completions of {len(rows):,} rows; "
            f"a run can have {MAX_ROWS:,}. Row {shorten(rows[largest].id)} asks for {counts[largest]:,}"
        )
    requests_by_row = zip(rows, _requests_by_row(runtime, rows, make_requests, renderer), strict=True)
    items_by_row = [(row, item) for row, items in requests_by_row for item in items]
    require(len(items_by_row) <= MAX_ROWS, f"{len(items_by_row):,} requests; a run can have {MAX_ROWS:,}")
    return RequestBatch(
        requests=[item for _, item in items_by_row if isinstance(item, Request)],
        request_rows=[row for row, item in items_by_row if isinstance(item, Request)],
        rejected=[item for _, item in items_by_row if isinstance(item, Rejected)],
        rejected_rows=[row for row, item in items_by_row if isinstance(item, Rejected)],
    )


def _requests_by_row(
    runtime: Runtime, rows: Sequence[Row], make_requests: MakeRequests, renderer: ChatRenderer | None
) -> Iterator[Sequence[Request | Rejected]]:
    pending: list[tuple[Row, Prompt | Rejected]] = []
    num_characters = 0
    tokenizer = runtime.model.tokenizer
    with ExitStack() as stack:
        has_chats = any(row.messages is not None for row in rows)
        if renderer is None and tokenizer is not None and has_template(tokenizer) and has_chats:
            renderer = stack.enter_context(make_renderer(tokenizer))
        for row in rows:
            text = _render_prompt(renderer, row)
            pending.append((row, text))
            num_characters += len(text) if isinstance(text, str) else 0
            if len(pending) == CHUNK_ROWS or num_characters > CHUNK_CHARACTERS:
                yield from _convert_chunk(runtime, pending, make_requests)
                pending, num_characters = [], 0
    yield from _convert_chunk(runtime, pending, make_requests)


def _convert_chunk(
    runtime: Runtime, pending: Sequence[tuple[Row, Prompt | Rejected]], make: MakeRequests
) -> Iterator[Sequence[Request | Rejected]]:
    requests = iter(make(runtime, [(row, prompt) for row, prompt in pending if not isinstance(prompt, Rejected)]))
    for row, prompt in pending:
        yield runtime.samples(prompt, row.overrides.n) if isinstance(prompt, Rejected) else next(requests)


def _render_prompt(renderer: ChatRenderer | None, row: Row) -> Prompt | Rejected:
    if row.error is not None:
        return Rejected(id=row.id, error=row.error)
    if row.prompt_ids is not None:
        return row.prompt_ids
    if row.messages is None:
        return row.prompt
    if renderer is None:
        return Rejected(id=row.id, error="the row is a chat, and the model's tokenizer has no chat template")
    try:
        return renderer.render(row.messages, row.template_kwargs)
    except TemplateRefusal as error:
        return Rejected(id=row.id, error=error.as_error)


def plan_rows(batch: RequestBatch, blocks: Sequence[Block], first_block: int = 0) -> list[PlannedRequest]:
    """The plan's rows. Joined requests share a slot. Rejected rows form an additional last block. `first_block`: number
    of blocks before this window."""
    planned = [
        _planned_request(batch.request_rows[member], batch.requests[member], block.index, micro_batch, position)
        for block in blocks
        for micro_batch, members in enumerate(block.micro_batches)
        for position, i in enumerate(members)
        for member in batch.joined[i].members
    ]
    pairs, last = zip(batch.rejected_rows, batch.rejected, strict=True), first_block + len(blocks)
    return planned + [_planned_request(row, item, last, 0, position) for position, (row, item) in enumerate(pairs)]


def _planned_request(row: Row, item: Request | Rejected, block: int, micro_batch: int, position: int) -> PlannedRequest:
    is_rejected = isinstance(item, Rejected)
    return PlannedRequest(
        row_id=row.id,
        row_index=row.index,
        sample_index=item.sample_index,
        block=block,
        micro_batch=micro_batch,
        position=position,
        num_prompt_tokens=item.num_prompt_tokens if is_rejected else len(item.prompt_ids),
        status="rejected" if is_rejected else "planned",
    )


def blocks_from_plan(planned: Iterable[PlannedRequest], batch: RequestBatch) -> tuple[Block, ...]:
    """The blocks of a stored plan; the inverse of `plan_rows`."""
    positions = {batch.requests[i].key: index for index, joined in enumerate(batch.joined) for i in joined.members}
    slots: dict[int, dict[int, dict[int, None]]] = {}
    for request in planned:
        if request.status == "planned" and request.key in positions:
            micro_batches = slots.setdefault(request.block, {})
            micro_batches.setdefault(request.micro_batch, {})[positions[request.key]] = None  # an ordered set
    return tuple(
        Block(
            index=index,
            micro_batches=tuple(
                tuple(with_hidden_beams(members, batch.computed)) for _, members in sorted(micro_batches.items())
            ),
        )
        for index, micro_batches in sorted(slots.items())
    )


def completed_rows(batch: RequestBatch, position: int, completion: Completion) -> Iterator[GenerationRow]:
    """The output rows of `batch.joined[position]`, one per member."""
    for i in batch.joined[position].members:
        row = _completed_row(batch.request_rows[i], batch.requests[i], completion)
        is_encoding = batch.requests[i].encoding is not None and completion.error is None
        yield replace(row, encoding=batch.read_columns(completion)) if is_encoding else row


def _completed_row(row: Row, request: Request, completion: Completion) -> GenerationRow:
    reason = completion.finish.value
    tokens = completion.logprobs if request.scoring is None else member_scores(request, completion)
    return GenerationRow(
        id=row.id,
        sample_index=request.sample_index,
        status="error" if reason == "error" else "ok",
        completion=completion.text,
        reasoning=completion.reasoning,
        beam_score=completion.beam_score,
        token_ids=completion.token_ids if request.scoring is None else request.target_ids,
        logprobs=[token.own for token in tokens],
        top_token_ids=[token.top_ids for token in tokens],
        top_logprobs=[token.top for token in tokens],
        finish_reason=None if reason == "error" else reason,
        error=completion.error,
        columns=row.columns,
        source_file=row.source_file,
    )


def rejected_rows(batch: RequestBatch) -> list[GenerationRow]:
    return [
        GenerationRow(
            id=reject.id,
            sample_index=reject.sample_index,
            status="error",
            error=reject.error,
            columns=row.columns,
            source_file=row.source_file,
        )
        for row, reject in zip(batch.rejected_rows, batch.rejected, strict=True)
    ]
