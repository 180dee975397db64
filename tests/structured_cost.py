"""What masks cost a run that reads its weights from disk: decode passes with a schema beside such without one.

`python -m tests.structured_cost MODEL [ROWS] [TOKENS] [ROUNDS]`, of a checkpoint that need not fit into memory. Rounds
take turns, so that a disk that gets slower does so for both; no row ends before its last token.
"""

import sys
import time
from statistics import median

from runtime import Prompt, Runtime
from runtime.engine.records import PassRecord, Phase
from runtime.requests.prompts import make_request
from runtime.sequences.grammar import Grammars
from runtime.sequences.sequence import Request
from tests.api_schemas import SCHEMAS, Schema

LONG: Schema = {"type": "array", "items": SCHEMAS["invoice"], "minItems": 1000}


def decode_seconds(runtime: Runtime, num_rows: int) -> list[float]:
    """The seconds of each decode pass."""
    times: list[float] = []

    def on_pass(record: PassRecord) -> None:
        if record.phase is Phase.decode:
            times.append(record.seconds)

    prompts = [Prompt(f"Invoice number {row}") for row in range(num_rows)]
    made = [
        make_request(runtime.model, runtime.config.sampling, str(row), prompt.text or "", prompt.overrides)
        for row, prompt in enumerate(prompts)
    ]
    requests = [request for request in made if isinstance(request, Request)]
    with runtime.open_with_backoff(requests) as (plan, session):
        for block in plan.blocks:
            session.run(block, requests, on_pass)
    return times


def main(model: str, num_rows: int = 64, num_tokens: int = 24, num_rounds: int = 3) -> None:
    mask_seconds, masks = [0.0], Grammars.masks

    def timed(*args: object) -> object:
        begin = time.perf_counter()
        made = masks(*args)  # pyright: ignore[reportArgumentType]
        mask_seconds[0] += time.perf_counter() - begin
        return made

    Grammars.masks = timed  # pyright: ignore[reportAttributeAccessIssue]
    common: dict[str, object] = {
        "model": model, "offload": "nvme", "resident_layers": 0, "policy": "fixed", "max_new_tokens": num_tokens,
        "micro_batch_size": num_rows // 2, "num_micro_batches": 2, "temperature": 0.7,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {"free": [], "bound": []}
    for _ in range(num_rounds):
        for name, own in (("free", {"ignore_eos": True}), ("bound", {"json_schema": LONG})):
            mask_seconds[0] = 0.0
            passes = decode_seconds(Runtime(**common, **own), num_rows)  # pyright: ignore[reportArgumentType]
            assert len(passes) == num_tokens - 1, f"{len(passes)} passes: rows ended early"
            seconds[name] += passes
            print(f"{name}: {median(passes):.4f} s a pass, of them masks {mask_seconds[0] / num_tokens:.4f} s")
    free, bound = median(seconds["free"]), median(seconds["bound"])
    print(f"{num_rows} rows: {free:.4f} s a pass without a schema, {bound:.4f} s with one: {bound / free - 1:+.1%}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
