"""What ranks agree on, given what each of them says."""

from types import SimpleNamespace
from typing import Any

from runtime.devices.rank_sync import MINIMUM, SyncBetweenPasses


def test_all_ranks_have_the_least_that_any_of_them_has_and_none_where_one_leaves_it_open() -> None:
    others = [[3, 9, 4], [7, None, 2]]
    ranks: Any = SimpleNamespace(exchange=lambda message: [message, *({**message, MINIMUM: each} for each in others)])
    assert SyncBetweenPasses(ranks, lambda: False).min_over_ranks([5, 8, 6]) == [3, None, 2]
