"""The terms of the ledger, worked out by hand for a toy shape."""

from dataclasses import replace

import pytest

from runtime.batching.prefixes import SharedPrefix
from runtime.plan.placement.memory import PAGE_TOKENS, SequenceSize, chunk_columns, kv_tokens, lane_entries
from runtime.plan.shape.attention import AttentionMethod, AttentionSizes, device_attention_bytes
from runtime.units import MIB
from tests.toy import HIDDEN, VOCAB, sizes_of, toy_shape

HEAD_DIM, NUMBER_BYTES = 64, 4


@pytest.mark.parametrize(("prompt", "answer"), [(1, 0), (1, 1), (15, 1), (16, 0), (16, 1), (100, 28)])
def test_a_sequence_has_room_in_whole_pages_and_in_no_page_more(prompt: int, answer: int) -> None:
    capacity = SequenceSize(num_prompt_tokens=prompt, max_new_tokens=answer).capacity_tokens
    assert capacity % PAGE_TOKENS == 0
    assert 0 <= capacity - (prompt + answer) < PAGE_TOKENS


def test_keys_and_values_of_a_block_are_those_of_all_its_sequences() -> None:
    lanes = [sizes_of([20, 5], max_new_tokens=16), sizes_of([1], max_new_tokens=15)]
    assert kv_tokens(toy_shape(), lanes) == 48 + 32 + 16
    padded = toy_shape(is_packed=False)  # rectangles as wide as the longest row
    assert kv_tokens(padded, lanes) == 2 * 48 + 16


@pytest.mark.parametrize(
    ("num_rows", "scratch"),
    [(3, 2 * 3 * VOCAB * 4), (600, 24 * MIB), (1280, 1280 * VOCAB * 4)],
    ids=["twice as much", "24 MiB of a few rows at a time", "as much"],
)
def test_logits_are_counted_with_what_sampling_makes_of_them(num_rows: int, scratch: int) -> None:
    entries = {e.name: e.num_bytes for e in lane_entries(toy_shape(), [sizes_of([1] * num_rows)], 64)}
    assert entries["logits"] == num_rows * VOCAB * 4 + scratch


def test_hidden_states_are_those_of_all_lanes_with_a_rotation_for_each_token() -> None:
    """And with what was embedded. Chunks of 64 tokens: the first lane's prompts have 60, the second's 100."""
    lanes = [sizes_of([20, 40]), sizes_of([100])]
    entries = {e.name: e.num_bytes for e in lane_entries(toy_shape(), lanes, 64)}
    assert entries["hidden states"] == (60 + 64) * (2 * HIDDEN + 2 * HEAD_DIM) * NUMBER_BYTES


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 9, 30, 31])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 4, 6, 8, 14, 60, 1000])
def test_no_chunk_of_a_longer_prompt_is_a_single_column(width: int, chunk_tokens: int) -> None:
    columns = chunk_columns(2, width, chunk_tokens)
    assert 1 <= columns <= width
    assert width == 1 or width % columns != 1
    allowed = max(2, chunk_tokens // 2)
    assert columns <= allowed or all(width % fewer == 1 for fewer in range(2, min(allowed, width) + 1))


@pytest.mark.parametrize("way", [way for way in AttentionMethod if way is not AttentionMethod.host])
def test_attention_on_an_accelerator_is_counted_by_its_way(way: AttentionMethod) -> None:
    """Not as a host's is. 8 rows of 1016 positions, of pages 1024; chunks of 512 tokens; by the toy's heads."""
    shape, lanes = replace(toy_shape(), attention_method=way), [sizes_of([1000] * 8)]
    counted = next(e for e in lane_entries(shape, lanes, 512) if e.name == "activations")
    sizes = AttentionSizes(
        num_heads=4,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        item_bytes=NUMBER_BYTES,
        num_rows=8,
        num_tokens=512,
        num_positions=8 * 1024,
        longest=1024,
    )
    assert counted.equation.endswith(f"attention {device_attention_bytes(way, sizes):,} B")


def test_lanes_that_share_hold_a_prefix_once() -> None:
    prefix = SharedPrefix(num_tokens=40)
    lanes = [[SequenceSize(num_prompt_tokens=50, max_new_tokens=3, prefix=prefix)] * 2] * 3
    assert kv_tokens(toy_shape(), lanes) == 3 * (48 + 2 * (64 - 32))
    assert kv_tokens(toy_shape(), lanes, among_lanes=True) == 48 + 6 * (64 - 32)
