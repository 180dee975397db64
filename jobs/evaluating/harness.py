"""lm-evaluation-harness, told what to ask, and what it makes of the answers."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.evaluator import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from runtime.errors import EvaluationError, MillraceError, require

from ..config.settings import GenerateConfig, semantic
from ..files.publishing import json_digest, publish, write_all
from ..record.passes import Start
from .asking import Answerer
from .config import EvaluateConfig
from .model import HarnessModel

log = logging.getLogger(__name__)
NOT_IN_NAMES = frozenset({"bootstrap_iters", "confirm_run_unsafe_code", "include_path"})  # what is asked is the same
UNSTABLE = frozenset({"date", "git_hash", "start_time", "end_time", "total_evaluation_time_seconds"})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """`tables`: the harness' own, of tasks and of groups where there are some."""

    directory: Path
    results: Mapping[str, Any]
    tables: tuple[str, ...]


def evaluation_directory(config: EvaluateConfig) -> Path:
    """The directory `run`, or one named after the tasks and all that can change what is asked or answered."""
    harness = {f"harness.{key}": value for key, value in vars(config.harness).items() if key not in NOT_IN_NAMES}
    model = Path(config.model.path or "hf").name if config.model.name == "hf" else config.model.name
    digest = json_digest({**semantic(_generation_part(config)), **harness, "tasks": list(config.tasks)})
    return (
        Path(config.output_root) / "evaluate" / (config.run or f"{model}-{'-'.join(config.tasks)[:80]}-{digest[:10]}")
    )


def evaluate(config: EvaluateConfig, should_stop: Callable[[], bool], start: Start) -> Evaluation:
    """Answers the tasks and writes what the harness computes. Raises the errors of runtime.errors; what the harness
    itself raises, of a task that cannot be loaded, say, comes as EvaluationError."""
    directory = evaluation_directory(config)
    manager = _manager(config.tasks, [*config.harness.include_path])
    model = HarnessModel(Answerer(_generation_part(config), directory, should_stop, start))
    directory.mkdir(parents=True, exist_ok=True)
    tracker = EvaluationTracker(output_path=str(directory / "harness"))
    try:
        results = simple_evaluate(
            model,
            model_args={"pretrained": model.tokenizer_name},
            evaluation_tracker=tracker,
            task_manager=manager,
            **_told(config),
        )
    except MillraceError:
        raise
    except Exception as error:
        log.debug("the harness failed", exc_info=True)
        raise EvaluationError(
            f"lm-evaluation-harness {lm_eval.__version__}: {type(error).__name__}: {error}"
        ) from error
    assert results is not None, "this is the only process"
    return _written(directory, dict(results), tracker)


def _told(config: EvaluateConfig) -> dict[str, Any]:
    harness, seed = config.harness, config.harness.seed
    return {
        "tasks": list(config.tasks),
        "num_fewshot": harness.num_fewshot,
        "limit": harness.limit if harness.limit is None or harness.limit < 1 else int(harness.limit),
        "apply_chat_template": harness.apply_chat_template,
        "fewshot_as_multiturn": harness.fewshot_as_multiturn,
        "system_instruction": harness.system_instruction,
        "gen_kwargs": dict(harness.gen_kwargs) if harness.gen_kwargs else None,
        "bootstrap_iters": harness.bootstrap_iters,
        "random_seed": seed,
        "numpy_random_seed": seed,
        "torch_random_seed": seed,
        "fewshot_random_seed": harness.fewshot_seed,
        "confirm_run_unsafe_code": harness.confirm_run_unsafe_code,
    }


def _manager(tasks: list[str], include_path: list[str | Path]) -> TaskManager:
    """The manager that knows the tasks. Where the user's own directories have them all, the harness' thousands of
    others are not looked through, which takes seconds. Raises ConfigError naming the nearest task."""
    own = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if own is not None and all(_is_known(task, own) for task in tasks):
        return own
    near = [get_close_matches(task, own.all_tasks, n=1, cutoff=0.8) for task in tasks] if own is not None else []
    manager = own if own is not None and any(near) else TaskManager(include_path=include_path or None)
    for task in tasks:
        close = get_close_matches(task, manager.all_tasks, n=1)
        hint = f"did you mean {close[0]}?" if close else "harness.include_path names directories with tasks of your own"
        require(_is_known(task, manager), f"tasks: {task!r} is not known: {hint}")
    return manager


def _is_known(task: str, manager: TaskManager) -> bool:
    return bool(manager.match_tasks([task])) or Path(task).is_file()


def _generation_part(config: EvaluateConfig) -> GenerateConfig:
    return GenerateConfig(**{each.name: getattr(config, each.name) for each in fields(GenerateConfig)})


def _written(directory: Path, results: dict[str, Any], tracker: EvaluationTracker) -> Evaluation:
    """Publishes `results.json`, which is the same however often the command is repeated, and the harness' own files."""
    samples = results.pop("samples", {})
    stable = {key: value for key, value in results.items() if key not in UNSTABLE}
    text = json.dumps(stable, indent=2, sort_keys=True, default=handle_non_serializable, ensure_ascii=False)
    publish(directory / "results.json", lambda file: write_all(file, text.encode()), exclusive=False)
    tracker.save_results_aggregated(results=results, samples=samples)
    for task, rows in samples.items():
        tracker.save_results_samples(task_name=task, samples=rows)
    tables = [make_table(results)] + ([make_table(results, "groups")] if results.get("groups") else [])
    return Evaluation(directory=directory, results=stable, tables=tuple(tables))
