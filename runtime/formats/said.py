"""What a config says of quantisation that is not done here: it is refused or named, never silently left out."""

import logging
from collections.abc import Mapping

from ..errors import CheckpointError

log = logging.getLogger(__name__)

MOST_SHOWN = 400  # characters of what a config says
UNQUANTISED = "the unquantised checkpoint; most models have one"


def refuse(what: str, readable: str) -> CheckpointError:
    """Returns the error for a variant that cannot be read, with what can be in its place."""
    what = what if len(what) <= MOST_SHOWN else f"{what[:MOST_SHOWN]}..."
    return CheckpointError(f"model.path: {what}, which cannot be read. Can be: {readable}, and {UNQUANTISED}")


def mention_activations(how: str) -> None:
    """Logs that inputs of products are not rounded as the config has it."""
    log.warning(
        "model.path: its config has activations quantised (%s); here they are not: the output is that of its "
        "dequantised weights",
        how,
    )


def mention_kv_cache() -> None:
    log.warning("model.path: its config has keys and values quantised; here they are kept in the compute dtype")


def mapping_in(values: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Returns the object under a key of the config, {} for anything else."""
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def whole_number(values: Mapping[str, object], key: str, default: int) -> int:
    """Raises CheckpointError for a value that is none."""
    found = values.get(key)
    if found is None:
        return default
    if type(found) is not int:
        raise CheckpointError(f"config.json: quantization_config.{key} is {found!r:.40}; a whole number is wanted")
    return found
