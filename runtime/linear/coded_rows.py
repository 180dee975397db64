"""Rows of codes of eight or four bits times the scale of their row, or of their group of columns, as `millrace pack`
rounds weights.

int8: a byte each. FP8: E4M3, likewise. int4: CODE_RUN numbers are half as many bytes, the first half of them in the low
half bytes, with 8 added to each. A scale is a bfloat16, so code times scale is exact in float32.

N rows of K numbers, of which R are wanted; G groups of columns.
"""

import numpy as np
import torch

from ..kernels.arguments import CODE_RUN, FLOAT8, GROUP_NUMBERS, INT4, INT4_MIDDLE, INT8
from .codes import Codes
from .packed_rows import Arrays, Layout, PackedRows, shift_to_group

ROUNDED = {"int8-rows": INT8, "int4-groups": INT4, "fp8-rows": FLOAT8}  # the ways of storage formats
NAMES = {way: name for name, way in ROUNDED.items()}


def bytes_of_codes(way: int, num_codes: int) -> int:
    return num_codes // 2 if way == INT4 else num_codes


class CodedRows(PackedRows):
    def __init__(self, codes_NB: torch.Tensor, scales_NG: torch.Tensor, way: int):
        """`codes_NB`: uint8; `scales_NG`: bfloat16, of equal groups whose width is a power of two, or one."""
        super().__init__(codes_NB, codes_NB.shape[1] * GROUP_NUMBERS // bytes_of_codes(way, GROUP_NUMBERS))
        self._scales_NG, self._way = scales_NG, way

    def _laid_out(self) -> tuple[Layout, Arrays]:
        num_groups, group_bytes = self._scales_NG.shape[1], bytes_of_codes(self._way, GROUP_NUMBERS)
        shift = shift_to_group(self.shape[1], num_groups)
        scales = self._scales_NG.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        return Layout(self._way, *self.shape, group_bytes, num_groups=num_groups, shift=shift), Arrays(scales=scales)

    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        codes, scales_RG = self._body_NB[rows], self._scales_NG[rows].float()
        if self._way == INT4:
            halves = codes.unflatten(1, (-1, 1, CODE_RUN // 2))
            out = out_RK.view(len(codes), -1, 2, CODE_RUN // 2)
            out.copy_(torch.cat([halves & 15, halves >> 4], dim=2)).sub_(INT4_MIDDLE)
        else:
            out_RK.copy_(codes.view(torch.int8 if self._way == INT8 else torch.float8_e4m3fn))
        out_RK.unflatten(1, (scales_RG.shape[1], -1)).mul_(scales_RG[..., None])

    def codes(self) -> Codes:
        """See `Rows`."""
        width = self.shape[1] // self._scales_NG.shape[1]
        added = INT4_MIDDLE if self._way == INT4 else 0
        body, scales = self._body_NB[None], self._scales_NG[None]
        return Codes(way=self._way, shape=self.shape, body=body, scales=scales, width=width, added=added)


def zero_rows(num_rows: int) -> CodedRows:
    """Rows of GROUP_NUMBERS zeros, to try a kernel with."""
    codes = torch.zeros(num_rows, GROUP_NUMBERS, dtype=torch.uint8)
    return CodedRows(codes, torch.ones(num_rows, 1, dtype=torch.bfloat16), INT8)
