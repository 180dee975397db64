"""What transformers' own `generate` hands to a class in each pass, where lanes keep its cache."""

import inspect
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """What the class calls its cache; empty where it takes none."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in known), "")


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """Tokens (B, T) behind those that `cache` holds; `mask_BS` is of all positions, `is_first` of prompts."""

    ids_BT: torch.Tensor
    positions_BT: torch.Tensor
    mask_BS: torch.Tensor
    is_first: bool

    def of(self, model: PreTrainedModel, cache: Cache) -> dict[str, object]:
        """The arguments as the class itself prepares them: recurrent classes drop the mask once prompts have passed.
        The cache stays the lane's, also where a class would begin another one (Phi-3's LongRoPE). Only the last logits
        are kept."""
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
