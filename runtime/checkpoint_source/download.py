"""Converts exceptions that transformers raises on a checkpoint's files into one-line errors."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..errors import CheckpointError, ConfigError, WeightstreamError
from ..out_of_memory import is_out_of_memory
from ..store.json_object import JsonObject
from .config_rules import find_key

log = logging.getLogger(__name__)

MAX_CHARACTERS = 240  # of an error in messages
SENTENCES = (ValueError, OSError, RuntimeError, ImportError)  # clear without the type of the exception
PACKAGE, TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
FOREIGN = PACKAGE / "foreign"  # model classes that transformers lacks: treated as foreign code
PASS_ON = (KeyboardInterrupt, SystemExit, GeneratorExit)


@contextmanager
def as_checkpoint_error(prefix: str, settings: JsonObject | None = None) -> Iterator[None]:
    """Converts exceptions into CheckpointErrors that begin with `prefix`. Weightstream's errors and interrupts pass.
    `settings`: config.json, to find the key of a name that transformers does not know.

    Catches BaseException, since untrusted files make libraries raise anything: KeyError, RecursionError, a panic of
    tokenizers, which is not an Exception. Put only calls inside that read such a file.
    """
    try:
        yield
    except (WeightstreamError, *PASS_ON):
        raise
    except BaseException as error:
        name = error.args[0] if isinstance(error, KeyError) and error.args else None
        key = find_key(settings, name) if settings is not None and isinstance(name, str) else None
        reason = f"{key}={name!a} is unknown to transformers" if key is not None else short_reason(error)
        raise CheckpointError(f"{prefix}: {reason}") from error


def short_reason(error: BaseException) -> str:
    """Formats an exception in one line of about `MAX_CHARACTERS`, with its type if the message alone is unclear."""
    text = " ".join(str(error).split())
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} ..."
    is_sentence = isinstance(error, SENTENCES) or type(error).__module__ != "builtins"
    return text if is_sentence and " " in text else f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def as_config_error(name: str) -> Iterator[None]:
    """Converts an exception of a model class into a ConfigError that names the class, and logs the traceback at debug
    level. Weightstream's errors, out-of-memory errors, and exceptions raised by this package alone pass.

    Catches every Exception, since classes run in unusual ways: without weights, on text alone, token by token. Put only
    calls inside that run such code.
    """
    try:
        yield
    except (WeightstreamError, MemoryError, OSError, AssertionError):  # assertions are bugs of this package
        raise
    except Exception as error:
        frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        outside_torch = [path for path in frames if not path.is_relative_to(TORCH)]
        is_ours = [path.is_relative_to(PACKAGE) and not path.is_relative_to(FOREIGN) for path in outside_torch]
        if is_out_of_memory(error) or all(is_ours):
            raise
        log.debug("%s raised", name, exc_info=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CHARACTERS]
        origin = f"Weightstream's replacement of a module ({outside_torch[-1].name})" if is_ours[-1] else "its code"
        raise ConfigError(
            f"model.path: {name} is not supported: {origin} raised {reason}; use transformers itself for this class"
        ) from error
