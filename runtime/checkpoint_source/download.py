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

MAX_CHARACTERS = 240
SENTENCES = (ValueError, OSError, RuntimeError, ImportError)  # whose text says enough
PACKAGE, TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
FOREIGN = PACKAGE / "foreign"  # classes of models that are not transformers': a stranger's code all the same
PASS_ON = (KeyboardInterrupt, SystemExit, GeneratorExit)


@contextmanager
def as_checkpoint_error(place: str, settings: JsonObject | None = None) -> Iterator[None]:
    """Converts any exception inside into a CheckpointError that begins with `place`. Our own errors and interrupts
    pass. If transformers does not know a name, `settings` tell which key has it.

    Catches BaseException, because untrusted files make libraries raise anything: KeyError, RecursionError, a panic of
    tokenizers, which is not an Exception. Only put calls inside that read such a file.
    """
    try:
        yield
    except (WeightstreamError, *PASS_ON):
        raise
    except BaseException as error:
        name = error.args[0] if isinstance(error, KeyError) and error.args else None
        key = find_key(settings, name) if settings is not None and isinstance(name, str) else None
        reason = f"{key}={name!a} is nothing that transformers knows" if key is not None else short_reason(error)
        raise CheckpointError(f"{place}: {reason}") from error


def short_reason(error: BaseException) -> str:
    """The message of `error` in one line of at most `MAX_CHARACTERS`, after its type if the message alone is
    unclear."""
    text = " ".join(str(error).split())
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} ..."
    is_sentence = isinstance(error, SENTENCES) or type(error).__module__ != "builtins"
    return text if is_sentence and " " in text else f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def as_config_error(name: str) -> Iterator[None]:
    """Converts an exception of a model class into a ConfigError that names the class; the traceback goes to the debug
    log. Our own errors, out-of-memory errors, and exceptions raised by this package alone pass.

    Catches every Exception, because classes run in ways that their authors did not expect: without weights, on text
    alone, token by token. Only put calls inside that run such code.
    """
    try:
        yield
    except (WeightstreamError, MemoryError, OSError, AssertionError):  # the last are mistakes of ours
        raise
    except Exception as error:
        frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        outside_torch = [path for path in frames if not path.is_relative_to(TORCH)]
        is_ours = [path.is_relative_to(PACKAGE) and not path.is_relative_to(FOREIGN) for path in outside_torch]
        if is_out_of_memory(error) or all(is_ours):
            raise
        log.debug("%s raised", name, exc_info=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CHARACTERS]
        whose = f"what stands for its weights here ({outside_torch[-1].name})" if is_ours[-1] else "its code"
        raise ConfigError(
            f"model.path: {name} cannot be run here: {whose} raised {reason}; use transformers itself for this class"
        ) from error
