"""Tests how a model class behaves in padded lanes. Also builds the inputs that `generate` passes to a class.

A copy with random weights runs one sequence alone, as `generate` does. Then it runs the sequence with left padding,
with the prompt in chunks, and interleaved with another sequence. The logits of these runs are compared.
Shapes: B rows, T new tokens, S cached and new tokens, V vocabulary."""

import copy
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ..errors import ConfigError
from .empty_weights import PROBE_ERRORS, copy_with_random_values
from .meta import build_meta_model

log = logging.getLogger(__name__)

NUM_PROMPT, NUM_DECODED, NUM_PADS, WINDOW = 7, 3, 3, 3  # tokens
NUM_COLUMNS = 4  # tokens per chunk of a prompt
SEPARATE_ROWS = "rows run one by one, as padding changes their results"
WHOLE_PROMPTS = "prompts are prefilled in one pass, as chunks change their results"
MAX_DEVIATION = 1e-3  # largest difference that counts as equal, in standard deviations of the logits


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the class's cache argument; "" if it has none."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in known), "")


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """The new tokens of a pass. `mask_BS`: attention mask for cached and new tokens. `is_first`: the tokens are of
    prompts."""

    ids_BT: torch.Tensor
    positions_BT: torch.Tensor
    mask_BS: torch.Tensor
    is_first: bool

    def make_arguments(self, model: PreTrainedModel, cache: Cache) -> dict[str, object]:
        """The keyword arguments of the class's forward, as the class prepares them for `generate`. The forward returns
        only the last logits. `cache` is used even if the class would start a new one (Phi-3 with LongRoPE)."""
        if not model.can_generate():
            known = {
                "input_ids": self.ids_BT,
                "attention_mask": self.mask_BS,
                "position_ids": self.positions_BT,
                "use_cache": True,
                cache_argument(model): cache,
            }
            names = inspect.signature(model.forward).parameters
            return {name: value for name, value in known.items() if name in names}
        prepared = model.prepare_inputs_for_generation(  # pyright: ignore[reportCallIssue] - a mixin that it does not see
            self.ids_BT,
            attention_mask=self.mask_BS,
            position_ids=self.positions_BT,
            use_cache=True,
            is_first_iteration=self.is_first,
            **{cache_argument(model): cache},
        )
        return {**prepared, cache_argument(model): cache, "logits_to_keep": 1}


@dataclass(frozen=True, kw_only=True)
class PaddingBehavior:
    """Reasons to run the rows of a lane one by one, and to prefill each prompt in one pass; "" if not necessary."""

    separate_rows_reason: str = ""
    whole_prompts_reason: str = ""


def probe_padding(model: PreTrainedModel) -> PaddingBehavior:
    """Tests a decoder in padded lanes. Both reasons are "" if the copy does not run or returns NaN. Raises ConfigError
    if the class keeps the state of a sequence outside its cache."""
    name = type(model).__name__
    if not cache_argument(model):
        raise ConfigError(f"model.path: {name} takes no cache, so lanes cannot keep the state of a sequence")
    try:
        config = copy.deepcopy(model.config)
        text = config.get_text_config(decoder=True)
        if getattr(text, "sliding_window", None):
            text.sliding_window = WINDOW  # shorter than the probe's sequence
        probe = copy_with_random_values(build_meta_model(config, torch.float32), num_layers=None)
        alone = _run_sequence(probe)
        if not bool(alone.isfinite().all()):
            return PaddingBehavior()
        interleaved = _run_sequence(probe, is_interleaved=True)
    except PROBE_ERRORS as error:
        log.debug("%s: padded lanes cannot be probed (%s)", name, error)
        return PaddingBehavior()
    if not _are_close(alone, interleaved):
        raise ConfigError(
            f"model.path: {name} keeps the state of a sequence in its modules, where lanes would overwrite it"
        )
    return PaddingBehavior(
        separate_rows_reason="" if _matches_unpadded(probe, alone, num_pads=NUM_PADS) else SEPARATE_ROWS,
        whole_prompts_reason="" if _matches_unpadded(probe, alone, columns=NUM_COLUMNS) else WHOLE_PROMPTS,
    )


def _matches_unpadded(
    probe: PreTrainedModel, alone: torch.Tensor, *, num_pads: int = 0, columns: int | None = None
) -> bool:
    """True if a run with `num_pads` left padding tokens, or with prompt chunks of `columns` tokens, gives the logits
    `alone`. False if the class raises."""
    try:
        return _are_close(alone, _run_sequence(probe, num_pads=num_pads, columns=columns))
    except PROBE_ERRORS as error:
        log.debug("%s: %d pads, chunks of %s columns: %s", type(probe).__name__, num_pads, columns, error)
        return False


def _are_close(alone: torch.Tensor, others: torch.Tensor) -> bool:
    return bool((alone - others).abs().max() <= MAX_DEVIATION * alone.std())


@torch.no_grad()
def _run_sequence(
    probe: PreTrainedModel, *, num_pads: int = 0, columns: int | None = None, is_interleaved: bool = False
) -> torch.Tensor:
    """Runs one sequence. Returns the last logits of its prefill and of each decode pass, as rows. `is_interleaved`: a
    pass of another sequence runs after each pass."""
    passes = _passes(probe, 0, num_pads, columns)
    other_passes = _passes(probe, 1, num_pads, columns)
    logits: list[torch.Tensor] = []
    for logits_V in passes:
        logits.append(logits_V)
        if is_interleaved:
            next(other_passes)
    return torch.stack(logits[-1 - NUM_DECODED :])


def _passes(probe: PreTrainedModel, first: int, num_pads: int, columns: int | None) -> Iterator[torch.Tensor]:
    """Runs a sequence with token ids computed from `first`. Yields the last token's logits of each pass. `columns`:
    tokens per chunk of the prompt; None: one pass."""
    cache = DynamicCache(config=probe.config)
    width = num_pads + NUM_PROMPT
    total = width + NUM_DECODED
    vocab_size = probe.config.get_text_config().vocab_size
    ids_1S = (torch.arange(first, first + total) * 7 + 11)[None] % min(vocab_size, 97)
    mask_1S = (torch.arange(total) >= num_pads).long()[None]
    positions_1S = (mask_1S.cumsum(-1) - 1).clamp(min=0)
    # The tokens after the padding must not depend on the number of padding tokens.
    ids_1S = torch.cat([torch.zeros(1, num_pads, dtype=torch.long), ids_1S[:, : total - num_pads]], 1)
    done = 0
    while done < total:
        end = min(width, done + (columns or width)) if done < width else done + 1
        inputs = PassInputs(
            ids_BT=ids_1S[:, done:end],
            positions_BT=positions_1S[:, done:end],
            mask_BS=mask_1S[:, :end],
            is_first=done < width,
        )
        yield probe(**inputs.make_arguments(probe, cache)).logits[0, -1]
        done = end
