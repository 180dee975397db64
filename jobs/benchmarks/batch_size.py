"""The batch size that a peer does best with, found on a part of the work."""

from collections.abc import Callable
from dataclasses import replace

from runtime.errors import MillraceError

from .contenders import Peer
from .task import Result, Task

TRIED_PROMPTS, TRIED_NEW_TOKENS = 128, 8  # at most


def with_batch_size(task: Task, measure: Callable[[Task], Result], say: Callable[[str], object]) -> Task:
    """`task` as it is where its batch size is given or it has none; else with the size after which the rate falls, or
    after which the peer fails. Raises MillraceError where it fails with the smallest."""
    entry = task.entry
    if task.batch_size is not None or not isinstance(entry, Peer) or not entry.batch_sizes:
        return task
    num_prompts = min(task.num_prompts, TRIED_PROMPTS)
    sizes = [size for size in entry.batch_sizes if size <= num_prompts] or [num_prompts]
    if len(sizes) == 1:
        return replace(task, batch_size=sizes[0])
    part = replace(task, num_prompts=num_prompts, num_new_tokens=min(task.num_new_tokens, TRIED_NEW_TOKENS))
    best, best_rate = sizes[0], 0.0
    for size in sizes:
        try:
            rate = measure(replace(part, batch_size=size)).rate
        except MillraceError as error:
            if size == sizes[0]:
                raise
            say(f"{task.contender} in batches of {size}: {error}")
            break
        say(f"{task.contender} in batches of {size}: {rate:.1f} tok/s")
        if rate < best_rate:
            break
        best, best_rate = size, rate
    return replace(task, batch_size=best)
