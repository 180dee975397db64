"""Which sequences are computed together: the blocks of a run, as many and as large as memory has room for."""

from collections.abc import Sequence
from dataclasses import replace

from ...batching.balance import Block
from ...config.settings import PolicyKind, RuntimeConfig
from ..placement.defaults import block_size, chunk_sizes, in_chunks, is_whole
from ..placement.placer import kv_tiers, place
from ..placement.run_load import bare, run_load
from .candidate import PlacedRun, Problem


def of_blocks(problem: Problem, blocks: tuple[Block, ...]) -> PlacedRun:
    """The run of blocks that are given, in the best of the usual chunks with which they fit."""
    *better, chunk = chunk_sizes(problem.shape, problem.config.policy, blocks)
    if better:
        chunk = _fitting_chunk(problem, bare(problem.config), blocks, wholly=True) or chunk
    return problem.placed(blocks, chunk)


def choose_blocks(problem: Problem, widths: Sequence[int], num_halvings: int) -> tuple[int, tuple[Block, ...]]:
    """Tokens of their chunks, and the blocks. `fixed`: as configured. `auto`: the most sequences, up to what is
    configured, whose block fits with no more resident layers than `offload.resident_layers` asks for. Of the `widths`
    of micro-batches the first that costs no room which something else needs, or the last."""
    shape, config = problem.shape, problem.config

    def counts(num_sequences: int) -> list[int]:
        return list(dict.fromkeys(-(-num_sequences // width) for width in widths))

    def divided(num_sequences: int, count: int) -> tuple[Block, ...]:
        return problem.blocks(-(-num_sequences // count), count)

    most = block_size(config.policy)
    if config.policy.kind is PolicyKind.fixed:
        *large, usual = counts(most)
        for blocks in (divided(most, count) for count in large):
            if chunk := _fitting_chunk(problem, bare(config), blocks, wholly=True):
                return chunk, blocks
        blocks = divided(most, usual)
        return chunk_sizes(shape, config.policy, blocks)[-1], blocks
    blocks: tuple[Block, ...] = ()
    for tier in kv_tiers(shape, config, has_device=problem.budgets.has_device):
        in_tier = replace(bare(config), kv=replace(config.kv, tier=tier))
        for num_sequences in _ladder(max(1, min(most, len(problem.sizes)) >> num_halvings)):
            *large, usual = counts(num_sequences)
            for count in (*large, usual):
                blocks = divided(num_sequences, count)
                if chunk := _fitting_chunk(problem, in_tier, blocks, wholly=count != usual):
                    return chunk, blocks
    return chunk_sizes(shape, config.policy, blocks)[-1], blocks


def _fitting_chunk(problem: Problem, config: RuntimeConfig, blocks: tuple[Block, ...], *, wholly: bool) -> int | None:
    """Tokens of the best chunks with which these blocks fit as `config` says."""
    shape, budgets = problem.shape, problem.budgets
    for chunk in chunk_sizes(shape, config.policy, blocks):
        chunked = in_chunks(config, chunk)
        load = run_load(shape, chunked, budgets, blocks, problem.sizes)
        placement = place(shape, chunked, budgets, load) if load.is_roomy else None
        if placement is not None and placement.fits and (not wholly or is_whole(placement)):
            return chunk
    return None


def _ladder(most: int) -> list[int]:
    """most, 3/4, 1/2, 3/8 ... 1 of it."""
    steps = {most >> turn for turn in range(most.bit_length())} | {
        3 * most >> turn + 2 for turn in range(most.bit_length())
    }
    return sorted(steps - {0}, reverse=True)
