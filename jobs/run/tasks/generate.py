"""Generation as a run's task: completions of each prompt."""

from collections.abc import Callable

from ...config.settings import GenerateConfig, run_directory
from ...record.output_rows import generation_schema
from ...record.passes import Start
from ...record.summary import Outcome
from ..requests import completion_requests
from ..run import run_task
from .task import Task


def generation_task(config: GenerateConfig) -> Task:
    """The task with an output row for each completion."""
    return Task(
        directory=run_directory(config),
        columns=lambda sampling: generation_schema(
            has_logprobs=sampling.logprobs > 0,
            has_reasoning=sampling.reasoning is not None,
            has_beams=(sampling.num_beams or 1) > 1,
        ),
        requests=completion_requests,
    )


def generate(config: GenerateConfig, should_stop: Callable[[], bool], start: Start | None = None) -> Outcome:
    """Runs the generation task; see `run_task`."""
    return run_task(generation_task(config), config, should_stop, start)
