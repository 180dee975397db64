"""Admission in waves: a block runs to its end, and is committed, before the next one begins."""

from collections.abc import Callable, Sequence

from runtime.batching.balance import Block
from runtime.engine.records import PassRecord
from runtime.plan.predict import Prediction
from runtime.session import Session

from .parts import PartStore
from .passes import pass_row
from .progress import Progress
from .requests import Asked, completed_row
from .summary import PassRow


def generate_waves(
    session: Session,
    asked: Asked,
    blocks: Sequence[Block],
    store: PartStore,
    *,
    after_pass: Callable[[], None],
    prediction: Prediction | None = None,
) -> None:
    """Generates and commits `blocks`. Raises Interrupted or OutputError: the block that ran is then lost."""
    num_tokens = sum(asked.requests[i].max_new_tokens for block in blocks for i in block.members)
    with Progress(num_tokens, len(blocks)) as progress:
        for block in blocks:
            passes: list[PassRow] = []

            def on_pass(record: PassRecord, passes: list[PassRow] = passes) -> None:
                passes.append(pass_row(record, record.index, prediction))
                progress.advance(record)
                after_pass()

            completions = session.run(block, asked.requests, on_pass)
            rows = [
                completed_row(asked.request_rows[i], completion)
                for i, completion in zip(block.members, completions, strict=True)
            ]
            store.commit(block.index, rows, passes)
            for completion in completions:
                progress.finish_row(completion)
            progress.finish_block()
