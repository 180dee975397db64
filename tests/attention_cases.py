"""Rows over KV pages that decode attention is tested on, and what its definition gives for them."""

from dataclasses import dataclass

import torch

from runtime.attention.views import Rule

P = 16
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    begins: tuple[int, ...] = (0, 0, 0, 0)
    ends: tuple[int, ...] = (1, 16, 77, 130)
    num_kv_heads: int = 2
    group: int = 4
    key_dim: int = 64
    value_dim: int = 64
    softcap: float | None = None
    has_sinks: bool = False
    is_in_one_run: bool = True  # keys and then values of a page side by side, so that pages lie apart
    size: float = 1.0  # of queries


@dataclass(frozen=True)
class Inputs:
    q_BHD: torch.Tensor
    k_NPHD: torch.Tensor
    v_NPHD: torch.Tensor
    tables_Bn: torch.Tensor
    begins_B: torch.Tensor
    ends_B: torch.Tensor


CASES = {
    "ragged": Case(),
    "one query head": Case(group=1, num_kv_heads=3),
    "group of five": Case(group=5),
    "group of eight": Case(group=8, num_kv_heads=1),
    "heads of 24": Case(key_dim=24, value_dim=24),
    "heads of 80": Case(key_dim=80, value_dim=80),
    "heads of 96": Case(key_dim=96, value_dim=96, group=1),
    "heads of 3": Case(key_dim=3, value_dim=5, group=3),
    "expanded latents": Case(key_dim=192, value_dim=128, group=1, num_kv_heads=4),
    "windows and chunks": Case(begins=(0, 15, 64, 127), ends=(1, 17, 77, 130)),
    "rows without positions": Case(begins=(0, 5, 9, 130), ends=(0, 5, 40, 130)),
    "no rows": Case(begins=(), ends=()),
    "softcap": Case(softcap=5.0, size=8.0),
    "softcap and small scores": Case(softcap=50.0, size=0.01),
    "sinks": Case(has_sinks=True),
    "sinks and softcap": Case(has_sinks=True, softcap=2.0, begins=(0, 3, 0, 100)),
    "peaked": Case(size=10.0),
    "keys apart from values": Case(is_in_one_run=False),
}


def make(case: Case, dtype: torch.dtype) -> Inputs:
    """Pages are handed out at random; what no row sees is NaN, and so are pages and table entries that none uses."""
    random = torch.Generator().manual_seed(5)
    num_rows, num_pages_of = len(case.ends), [-(-end // P) for end in case.ends]
    num_pages = sum(num_pages_of) + 2
    width = max(num_pages_of, default=0) + 1
    order = torch.randperm(num_pages, generator=random).tolist()
    shapes = [(num_pages, P, case.num_kv_heads, dim) for dim in (case.key_dim, case.value_dim)]
    if case.is_in_one_run:
        sizes = [torch.Size(shape[1:]).numel() for shape in shapes]
        run = torch.full((num_pages, sum(sizes)), NAN, dtype=dtype)
        k, v = (part.unflatten(1, shape[1:]) for part, shape in zip(run.split(sizes, 1), shapes, strict=True))
    else:
        k, v = (torch.full(shape, NAN, dtype=dtype) for shape in shapes)
    tables = torch.full((num_rows, width), -1, dtype=torch.int32)
    for row, (begin, end) in enumerate(zip(case.begins, case.ends, strict=True)):
        for position in range(begin, end):
            if tables[row, position // P] < 0:
                tables[row, position // P] = order.pop()
            page = int(tables[row, position // P])
            k[page, position % P] = torch.randn(k.shape[2:], generator=random).to(dtype)
            v[page, position % P] = torch.randn(v.shape[2:], generator=random).to(dtype)
    q = case.size * torch.randn(num_rows, case.num_kv_heads * case.group, case.key_dim, generator=random)
    return Inputs(q.to(dtype), k, v, tables, torch.tensor(case.begins, dtype=torch.int32), torch.tensor(case.ends))


def options(case: Case) -> dict[str, Rule]:
    sinks = torch.linspace(-1, 3, case.num_kv_heads * case.group) if case.has_sinks else None
    return {"rule": Rule(case.key_dim**-0.5, case.softcap, sinks)}


def naive(inputs: Inputs, case: Case) -> torch.Tensor:
    """Position by position and head by head in float64, as the definition reads."""
    out = torch.zeros(*inputs.q_BHD.shape[:2], case.value_dim, dtype=torch.float64)
    sinks = options(case)["rule"].sinks
    for row, (begin, end) in enumerate(zip(case.begins, case.ends, strict=True)):
        places = [(int(inputs.tables_Bn[row, p // P]), p % P) for p in range(begin, end)]
        for head in range(inputs.q_BHD.shape[1]) if places else ():
            k_SD = torch.stack([inputs.k_NPHD[page, at, head // case.group] for page, at in places]).double()
            v_SD = torch.stack([inputs.v_NPHD[page, at, head // case.group] for page, at in places]).double()
            scores = k_SD @ inputs.q_BHD[row, head].double() * case.key_dim**-0.5
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if isinstance(sinks, torch.Tensor):
                scores = torch.cat([scores, sinks[head, None].double()])
            out[row, head] = torch.softmax(scores, 0)[: len(places)] @ v_SD
    return out


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of 16 bits: their own rounding of `out`
