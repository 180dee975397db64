"""python -m jobs.serve: serves OpenAI's Files and Batches API on this machine."""

import logging
import sys
from dataclasses import replace
from typing import TypeVar

import hydra
from hydra.errors import HydraException

from jobs.config.cli import as_job, describe_hydra_error, run_job
from jobs.config.settings import Composed, EncodeConfig, GenerateConfig, load
from jobs.config.typed import flatten, known_keys
from jobs.config.words import quote, rewrite_words, suggest_key
from jobs.serving.config import ServeConfig, absolute_path_settings, job_settings
from runtime.errors import ConfigError

C = TypeVar("C", GenerateConfig, EncodeConfig)


@hydra.main(config_path="../conf", config_name="serve", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(ServeConfig, composed)
    logging.basicConfig(
        level=config.log_level.value.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    composed_job = _compose_job("generate", GenerateConfig, job_settings("generate", config.settings))
    if job_settings("encode", config.settings) != job_settings("generate", config.settings):
        _compose_job("encode", EncodeConfig, job_settings("encode", config.settings))
    config = replace(config, settings=[*config.settings, *absolute_path_settings(flatten(composed_job))])
    try:
        from jobs.serving.server import serve
    except ImportError as error:
        raise ConfigError(f"weightstream serve needs an extra: pip install 'weightstream[serve]' ({error})") from error
    serve(config, _compose_job("generate", GenerateConfig, job_settings("generate", config.settings)))


def _compose_job(job: str, kind: type[C], settings: list[str]) -> C:
    """Composes and checks the settings of a job. Raises ConfigError."""
    if (suggestion := suggest_key(settings, kind)) is not None:
        raise ConfigError(suggestion)
    try:
        return load(kind, hydra.compose(job, rewrite_words(settings, kind)))
    except HydraException as error:
        raise ConfigError(describe_hydra_error(error, known_keys(kind))) from error


def collect_settings(arguments: list[str]) -> list[str]:
    """Moves overrides for jobs, such as `model=hf`, into the setting `settings`."""
    server_keys = {*known_keys(ServeConfig), "hydra"}
    groups = {word: word.lstrip("+~").partition("=")[0].partition(".")[0] for word in arguments}
    overrides = [word for word in arguments if "=" in word and word[0] != "-" and groups[word] not in server_keys]
    if not overrides:
        return arguments
    return [*(word for word in arguments if word not in overrides), f"settings=[{','.join(map(quote, overrides))}]"]


if __name__ == "__main__":
    sys.argv[1:] = collect_settings(sys.argv[1:])
    run_job(main, ServeConfig)
