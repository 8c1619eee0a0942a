"""What the attention kernels refuse, and towers in PyTorch; that kernels are exact is in
tests/ops/triton and tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.bench import measure
from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.attention import attention, torch_native, towers
from hf_packfree.ops.attention.triton_native import plan_blocks, reach
from hf_packfree.ops.backend import Target
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms


def meta(tokens: int, heads: int) -> torch.Tensor:
    return torch.empty(1, tokens, heads, 256, device="meta", dtype=torch.bfloat16)


def test_documents_beyond_32_bits_are_refused():
    packed = PackedSequence.from_lengths([1, 5])
    far_apart = torch.empty_strided(
        (1, 6, 1, 256), (2**32, 2**29, 256, 1), device="meta", dtype=torch.bfloat16
    )
    with pytest.raises(
        BackendUnavailable,
        match="found a document of 5 tokens, more than .* wanted shorter .*varlen",
    ):
        attention(far_apart, meta(6, 1), meta(6, 1), packed, backend="triton")


def test_the_distance_of_tokens_in_memory_counts_as_the_kernels_read_it():
    """262,144 tokens of 32 heads of 256 just fit into 32 bits, and a head-first layout is made
    dense before it is measured.
    """
    longest = 2**18
    assert reach(meta(longest, 32), meta(longest, 1), meta(longest, 1), longest) <= 2**31
    head_first = torch.empty(
        1, 32, longest + 1, 256, device="meta", dtype=torch.bfloat16
    ).transpose(1, 2)
    packed = PackedSequence.from_lengths([longest + 1])
    with pytest.raises(BackendUnavailable, match="found a document of 262145 tokens"):
        attention(head_first, meta(longest + 1, 1), meta(longest + 1, 1), packed, backend="triton")


@pytest.mark.parametrize("backend", ["varlen", "triton"])
def test_dropout_runs_in_pytorch_eager_whatever_the_backend(backend):
    packed, (q, k, v) = PackedSequence.from_lengths([3, 5]), torch.randn(3, 1, 8, 2, 16)
    outputs = []
    for name in (backend, "torch"):
        torch.manual_seed(0)
        outputs.append(attention(q, k, v, packed, dropout=0.5, backend=name))
    assert torch.equal(*outputs) and not torch.equal(outputs[0], attention(q, k, v, packed))


def test_what_is_not_all_of_one_half_precision_is_refused():
    half, packed = meta(6, 1), PackedSequence.from_lengths([6])
    for wide in (half.float(), half.half()):
        with pytest.raises(
            BackendUnavailable,
            match=r"found .*torch\.float(32|16) for the varlen attention kernels; wanted",
        ):
            attention(half, wide, half, packed, backend="varlen")


@pytest.mark.parametrize("follows", [False, True], ids=["queries", "keys"])
def test_blocks_cover_every_token_once_and_the_longest_come_first(follows):
    packed = PackedSequence.from_lengths([1, 128, 129, 300, 5])
    blocks = plan_blocks(packed, follows)
    tokens = torch.cat(
        [
            first + torch.arange(start, min(start + 128, length))
            for first, start, length, _ in blocks.tolist()
        ]
    )
    assert torch.equal(tokens.sort().values, torch.arange(packed.num_tokens))
    work = blocks[:, 2] - blocks[:, 1] if follows else blocks[:, 1]
    assert (work.diff() <= 0).all()
    # somebody reads every query
    assert not blocks[:, 3].any()
    assert {tuple(block[::2]) for block in blocks.tolist()} == {
        (0, 1),
        (1, 128),
        (129, 129),
        (258, 300),
        (558, 5),
    }


def test_pytorch_eager_pads_documents_on_a_cpu_by_31_tokens_at_most(monkeypatch):
    """Elsewhere by an eighth of the next power of two, which makes fewer calls."""
    packed = PackedSequence.from_lengths([1199, 5, 690, 1200, 90, 93])
    plan = torch_native.plan_batches(packed)
    assert plan.shapes == ((1, 8), (2, 96), (1, 704), (2, 1216))
    assert torch.equal(plan.gather[plan.places], torch.arange(packed.num_tokens))
    monkeypatch.setattr(torch_native, "_STEP", {})
    assert torch_native.plan_batches(packed).shapes == ((1, 8), (2, 96), (1, 768), (2, 1280))


def test_the_backward_pass_allocates_a_row_once_however_many_lengths_it_has():
    """Not a gradient of the whole row for each of them, to be added up."""
    taken = []
    for lengths in ([112] * 10, range(40, 200, 16)):
        packed = PackedSequence.from_lengths(lengths)
        q, k, v = (torch.randn(1, packed.num_tokens, 2, 32, requires_grad=True) for _ in range(3))
        out = attention(q, k, v, packed)
        events = measure._allocations(lambda: out.sum().backward())
        sizes = (int(event["args"]["Bytes"]) for event in events)
        taken.append(sum(size for size in sizes if size > 0) / q.nbytes)
    assert taken[1] <= 1.25 * taken[0], taken


@pytest.mark.parametrize("lengths", [[1], [7], [4, 4, 4], [3, 4, 4, 1, 1, 4]])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_towers_attend_in_both_directions_within_segments(lengths, scale):
    """Against the mask of all pairs, values and gradients; those of lone queries and keys are
    zero but for rounding.
    """
    torch.manual_seed(0)
    packed = PackedSequence.from_lengths(lengths)
    leaves = [
        torch.randn(1, packed.num_tokens, 2, 24, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    mask = packed.seq_idx[0, :, None] == packed.seq_idx[0, None]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    weights = (q @ k.mT * (scale or 24**-0.5)).masked_fill(~mask, float("-inf")).softmax(-1)
    wanted, found = (
        (weights @ v).transpose(1, 2),
        towers.tower_attention(*leaves, packed, scale=scale),
    )
    direction = torch.randn_like(wanted)
    assert relative_rms(found, wanted) <= 1e-12
    for one, other in zip(
        *(torch.autograd.grad((out * direction).sum(), leaves) for out in (found, wanted))
    ):
        assert relative_rms(one, other, floor=1e-3) <= 1e-12


@pytest.mark.parametrize(
    "size, reason", [(64, None), (72, None), (80, None), (36, "multiple of 8; the model has 36")]
)
def test_a_towers_head_size_decides_not_the_text_models(size, reason):
    found = towers.OP.backends["varlen"].unusable(
        Target("cuda", (9, 0), sizes={"head_size": 300, "tower_head_size": size})
    )
    assert found is None if reason is None else reason in found
    assert "bfloat16" in towers.OP.backends["varlen"].unusable(
        Target("cuda", (9, 0), torch.float32, {"tower_head_size": 64})
    )
