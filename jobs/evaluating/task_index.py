"""Finds tasks of lm-evaluation-harness by name, without torch: a misspelled task is refused before slow imports."""

import logging
from difflib import get_close_matches
from pathlib import Path

from lm_eval.tasks import TaskManager

from runtime.errors import require

log = logging.getLogger(__name__)


def find_tasks(tasks: list[str], include_path: list[str | Path]) -> TaskManager:
    """Returns a manager that knows the tasks. Skips indexing the bundled tasks, which takes seconds, if `include_path`
    has all of `tasks`. Raises ConfigError naming the closest task."""
    log.info("reading the tasks of lm-evaluation-harness")
    own = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if own is not None and all(_is_known(task, own) for task in tasks):
        return own
    near = [get_close_matches(task, own.all_tasks, n=1, cutoff=0.8) for task in tasks] if own is not None else []
    manager = own if own is not None and any(near) else TaskManager(include_path=include_path or None)
    for task in tasks:
        close = get_close_matches(task, manager.all_tasks, n=1)
        hint = f"did you mean {close[0]}?" if close else "set harness.include_path for your own tasks"
        require(_is_known(task, manager), f"tasks: unknown task {task!r}: {hint}")
    return manager


def _is_known(task: str, manager: TaskManager) -> bool:
    return bool(manager.match_tasks([task])) or Path(task).is_file()
