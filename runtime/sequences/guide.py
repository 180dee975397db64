"""The state of a sequence in its grammar, and masks of tokens that are allowed next. The state depends only on the
tokens, so it can be rebuilt from them. Shapes: B rows, W mask words of 32 tokens, V vocabulary."""

# pyright: reportMissingImports=false
# llguidance is an optional dependency.

from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

BITS = 32  # tokens per mask word


@dataclass(kw_only=True)
class Guide:
    """The state of one sequence in its grammar.

    `matcher`: llguidance's state. `num_consumed`: number of generated tokens that are processed, including reasoning
    before the structure. `opening`: the state in the grammar of a reasoning tag, which the completion may begin with
    instead of the structure. `pending_mask`: (future of masks, this guide's row); until the future is done, its thread
    uses both matchers, and no other thread may."""

    matcher: "LLMatcher"
    opening: "LLMatcher | None" = None
    num_consumed: int = 0
    pending_mask: tuple[Future[torch.Tensor], int] | None = None

    def accept(self, generated: Rows[int]) -> None:
        """Advances the state by the new tokens in `generated`."""
        if self.num_consumed < len(generated):
            self.mask()  # waits until the mask's thread no longer uses the matchers
            tokens = list(generated[self.num_consumed :])
            if self.opening is not None:  # keep both states while the tokens fit both structure and reasoning tag
                if self.opening.validate_tokens(tokens) < len(tokens):
                    self.opening = None
                elif self.matcher.validate_tokens(tokens) < len(tokens):
                    self.matcher, self.opening = self.opening, None
                else:
                    self.opening.consume_tokens(tokens)
            self.matcher.consume_tokens(tokens)
            self.num_consumed, self.pending_mask = len(generated), None

    def mask(self) -> torch.Tensor | None:
        """Waits for the pending mask, int32 (words), and returns it. None if no mask is pending."""
        if self.pending_mask is None:
            return None
        masks, row = self.pending_mask
        return masks.result()[row]

    @property
    def error(self) -> str | None:
        """The matcher's error, if any: a limit of llguidance was exceeded, or a token is outside the grammar."""
        self.mask()  # waits until the mask's thread no longer uses the matcher
        return self.matcher.get_error() if self.matcher.is_error() else None


def fill_masks(executor: "LLExecutor", guides: Rows[Guide | None], vocab_size: int) -> torch.Tensor:
    """Computes masks of allowed next tokens, int32 (guides, words), with one bit per token. If a guide is None, its row
    allows all tokens."""
    num_words = -(-vocab_size // BITS)
    masks_BW = torch.full((len(guides), num_words), -1, dtype=torch.int32)
    matchers = [(guide.matcher, row) for row, guide in enumerate(guides) if guide is not None]
    opening = [(guide.opening, row) for row, guide in enumerate(guides) if guide is not None and guide.opening]
    if matchers:
        executor.unsafe_compute_mask_ptr(matchers, masks_BW.data_ptr(), num_words * masks_BW.itemsize, len(guides))
    if opening:
        tags_BW = torch.zeros_like(masks_BW)
        executor.unsafe_compute_mask_ptr(opening, tags_BW.data_ptr(), num_words * masks_BW.itemsize, len(guides))
        masks_BW |= tags_BW
    return masks_BW


def apply_masks(scores_BV: torch.Tensor, masks_BW: torch.Tensor) -> torch.Tensor:
    """Returns scores with minus infinity where the bit is 0. Does not modify `scores_BV`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=masks_BW.device)
    bits_BV = ((masks_BW.view(torch.uint8)[..., None] >> shifts) & 1).view(len(masks_BW), -1)
    return torch.where(bits_BV[:, : scores_BV.shape[-1]].bool(), scores_BV, -torch.inf)
