"""What the tests of judgments share: a table of them as a run's parts have it."""

import pyarrow as pa


def table(*judgments: tuple[str, int, int, str | None, int | None], baseline: str | None = None) -> pa.Table:
    """Model, question, turn, judgment (None: an error), game."""
    rows = [
        {
            "id": str(index),
            "sample_index": 0,
            "status": "error" if said is None else "ok",
            "completion": said or "",
            "question_id": question,
            "category": "math",
            "model": model,
            "baseline": baseline,
            "turn": turn,
            "game": game,
            "prompt_name": "single-v1",
            "user_prompt": "?",
        }
        for index, (model, question, turn, said, game) in enumerate(judgments)
    ]
    return pa.Table.from_pylist(rows)


RATED = table(
    ("good", 1, 1, "[[9]]", None),
    ("good", 2, 1, "[[7]]", None),
    ("good", 1, 2, "[[5.5]]", None),
    ("good", 2, 2, None, None),
    ("bad", 1, 1, "[[2]]", None),
    ("bad", 2, 1, "no number", None),
)
