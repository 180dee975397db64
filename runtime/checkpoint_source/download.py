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

MAX_CHARACTERS = 240  # limit for the text of an exception that is part of a message
SENTENCES = (ValueError, OSError, RuntimeError, ImportError)  # their texts are clear without the exception's type
PACKAGE, TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
FOREIGN = PACKAGE / "foreign"  # model classes that transformers lacks; their errors are reported as a model's
PASS_ON = (KeyboardInterrupt, SystemExit, GeneratorExit)  # never converted


@contextmanager
def as_checkpoint_error(prefix: str, settings: JsonObject | None = None) -> Iterator[None]:
    """Converts exceptions of the `with` block into CheckpointErrors that begin with `prefix`. Weightstream's own errors
    and interrupts are not converted. `settings`: the content of config.json; if transformers raises KeyError for a
    value in it, the message names the value's key.

    Catches BaseException, since untrusted files make libraries raise anything: KeyError, RecursionError, or a panic of
    the tokenizers library, which is not an Exception. The `with` block should contain only calls that read such files.
    """
    try:
        yield
    except (WeightstreamError, *PASS_ON):
        raise
    except BaseException as error:
        unknown = error.args[0] if isinstance(error, KeyError) and error.args else None
        key = find_key(settings, unknown) if settings is not None and isinstance(unknown, str) else None
        reason = f"{key}={unknown!a} is unknown to transformers" if key is not None else short_reason(error)
        raise CheckpointError(f"{prefix}: {reason}") from error


def short_reason(error: BaseException) -> str:
    """Formats an exception in one line of about `MAX_CHARACTERS`, with its type if the message alone is unclear."""
    text = " ".join(str(error).split())
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} ..."
    is_sentence = isinstance(error, SENTENCES) or type(error).__module__ != "builtins"
    if is_sentence and " " in text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def as_config_error(name: str) -> Iterator[None]:
    """Converts an exception of a model class into a ConfigError that contains `name`, the class's name. Logs the
    traceback at debug level. Not converted: Weightstream's own errors, out-of-memory errors, and exceptions with only
    Weightstream and torch in the traceback.

    Catches every Exception, since model classes run here in unusual ways: without weights, on text alone, token by
    token. The `with` block should contain only calls that run a model's code.
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
