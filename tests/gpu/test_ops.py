"""Every backend of every operation: against the torch-native reference, and a document in a row
against the document alone.
"""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from hf_packfree.ops.backend import installed
from hf_packfree.ops.delta_rule.flash_qla import planned_cu_seqlens
from hf_packfree.ops.fused import projections
from tests.benchmarks.shapes import TOKENS
from tests.gpu.checks import DEVICE, LENGTHS, LONG, TRIAL, gpu, record_of, spans
from tests.gpu.op import as_leaves, cut
from tests.gpu.op_table import OPS, op_cases
from tests.support import relative_rms

pytestmark = gpu
# (values, gradients): relative RMS against it in fp64 on the same inputs; in brackets the worst on
# an H200
REFERENCE = {
    # gradients that TileLang and FLA compute have TF32 products (1.4e-3)
    torch.float32: (1e-4, 5e-3),
    # the delta rule's, which rounds between its products (4.4e-3, 5.3e-3)
    torch.bfloat16: (1e-2, 3e-2),
    # rounds finer than bf16, so its limits hold; what is looked for is overflow
    torch.float16: (1e-2, 3e-2),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TF32 = 2.0**-11
"""FLA solves its triangular systems in TF32 at any precision: 1.0e-4 on an H200, of the gated delta
rule and of Kimi Delta Attention. With that constant at "ieee" the former is 2.7e-7 off; the latter's
reference in fp64, whose block inverse alone multiplies in TF32, is 8.5e-5 off.
"""
NOISE = 5e-3
"""Relative RMS of what is not promised bit for bit: torch's products, and gradients' order of
summation in bf16 (3.1e-3).
"""
ATOMIC = ("causal_conv1d", "varlen")
"""They add some gradients, of the weight or of queries, in whatever order programs end: bits
differ from call to call.
"""
LEAK = 1e-2
"""A tenth of the smallest leak there is, a convolution's first three tokens of a document
(0.105); NOISE is half of it.
"""
PRODUCT = 1e-2
"""Two roundings of bf16, 2 ** -8 each: another order of summation may round every element to its
neighbour (3.5e-5).
"""


def adds_anyhow(op, backend):
    """Whether some gradient is summed in whatever order programs end, as cuDNN's is of queries."""
    return backend in ATOMIC or op.name == "attention, long documents"


def run(op, leaves, packed, backend, weight):
    """Return the output and {leaf: gradient} of a fixed random functional."""
    output = op.run(leaves, packed, backend)
    (output * weight.to(output.dtype)).sum().backward()
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def same_bits_twice(op, backend):
    """Values and gradients of every leaf, of the same inputs."""
    torch.manual_seed(0)
    packed = record_of(LENGTHS)
    values = as_leaves(op.leaves(sum(LENGTHS)), torch.float32 if TRIAL else torch.bfloat16)
    weight = functional(op, values, packed)
    (output, gradients), (again, others) = (
        run(
            op,
            {name: leaf.detach().clone().requires_grad_() for name, leaf in values.items()},
            packed,
            backend,
            weight,
        )
        for _ in range(2)
    )
    differ = [
        name for name, gradient in gradients.items() if not torch.equal(gradient, others[name])
    ]
    assert torch.equal(output, again) and not differ, f"gradients of {differ} differ"


def functional(op, values, packed):
    """fp64 weights of the output's shape [1, T, ...]."""
    with torch.no_grad():
        shape = op.run(as_leaves(values, torch.float32), packed, "torch").shape
    return torch.randn(shape, dtype=torch.float64).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("op, backend", op_cases(torch_too=False))
def test_equals_the_reference(op, backend, dtype, record, precise, request):
    if backend == "fla" and not TRIAL and dtype != torch.bfloat16:
        request.getfixturevalue("untuned")
    torch.manual_seed(0)
    packed = record_of(LENGTHS)
    # rounded once, for both sides alike
    values = as_leaves(op.leaves(sum(LENGTHS)), dtype)
    weight = functional(op, values, packed)
    found = run(op, as_leaves(values, dtype), packed, backend, weight)
    wanted = run(op, as_leaves(values, torch.float64), packed, "torch", weight.to(dtype).double())
    limits = REFERENCE[dtype]
    solves = op.name.startswith("delta rule") or op.function == "kda"
    if solves and (backend, dtype) == ("fla", torch.float32):
        limits = TF32, limits[1]
    record(
        f"{op.name}, {backend}: values against fp64",
        relative_rms(found[0], wanted[0]),
        limits[0],
        dtype=str(dtype),
    )
    for leaf, gradient in found[1].items():
        error = relative_rms(gradient, wanted[1][leaf])
        record(
            f"{op.name}, {backend}: gradient of {leaf} against fp64",
            error,
            limits[1],
            dtype=str(dtype),
        )


@pytest.mark.parametrize("op, backend", op_cases(torch_too=True))
def test_a_document_in_a_row_equals_the_document_alone(op, backend, record):
    """bf16, the same kernels; "alone" is a record of one segment."""
    torch.manual_seed(0)
    dtype = torch.float32 if TRIAL else torch.bfloat16
    leaves = as_leaves(op.leaves(sum(LONG)), dtype)
    packed = record_of(LONG)
    weight = functional(op, leaves, packed)
    output, gradients = run(op, leaves, packed, backend, weight)
    alone = [
        run(
            op, cut(op, leaves, begin, end), record_of([end - begin]), backend, weight[:, begin:end]
        )
        for begin, end in spans(LONG)
    ]
    outputs = torch.cat([document[0] for document in alone], 1)
    differ = [
        end - begin
        for begin, end in spans(LONG)
        if not torch.equal(output[:, begin:end], outputs[:, begin:end])
    ]
    limit = 0.0 if backend in op.exact else NOISE
    facts = {"worst": float((output - outputs).abs().max()), "lengths_that_differ": differ}
    record(
        f"{op.name}, {backend}: values, packed against alone",
        relative_rms(output, outputs),
        limit,
        **facts,
    )
    for leaf, gradient in gradients.items():
        parts = [document[1][leaf] for document in alone]
        together = (
            sum(part.double() for part in parts) if leaf in op.shared else torch.cat(parts, 1)
        )
        what = f"{op.name}, {backend}: gradient of {leaf}, packed against alone"
        exact = backend in op.exact_gradients and leaf not in op.shared
        record(what, relative_rms(gradient, together), 0.0 if exact else NOISE)
    if backend in op.exact:
        assert not differ, f"documents of {differ} tokens differ"


@pytest.mark.parametrize(
    "op, backend", [case for case in op_cases(torch_too=True) if case.values[0].mixes]
)
def test_control_without_boundaries_leaks(op, backend, record):
    torch.manual_seed(0)
    leaves = as_leaves(op.leaves(sum(LENGTHS)), torch.float32 if TRIAL else torch.bfloat16)
    with torch.no_grad():
        leaking = op.run(leaves, record_of([sum(LENGTHS)]), backend)
        exact = op.run(leaves, record_of(LENGTHS), backend)
    leak = relative_rms(leaking, exact)
    record(f"{op.name}, {backend}: control, one document instead of {len(LENGTHS)}", leak)
    assert leak > LEAK


@pytest.mark.parametrize(
    "op, backend", [case for case in op_cases(torch_too=False) if not adds_anyhow(*case.values)]
)
def test_twice_gives_the_same_bits(op, backend):
    same_bits_twice(op, backend)


@pytest.mark.parametrize(
    "op",
    [case.values[0] for case in op_cases(torch_too=False) if case.values[1] == "causal_conv1d"],
    ids=lambda op: op.name,
)
def test_twice_gives_the_same_bits_under_determinism(op):
    """causal-conv1d sums its weight's gradient in a fixed order then, from 1.6 on."""
    if (found := installed("causal-conv1d")) is not None and Version(found) < Version("1.6"):
        pytest.skip(f"causal-conv1d {found} does not heed torch; 1.6 does")
    # torch's own around it need not be
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        same_bits_twice(op, "causal_conv1d")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "outputs, inputs", [(6144, 2048), (2048, 6144), (2048, 2048), (512, 2048), (16, 2048)]
)
def test_rows_of_a_matrix_product(outputs, inputs, record):
    """What the matrix library adds: the same tokens in a product with more rows. Measured;
    nobody promises it.
    """
    dtype = torch.float32 if TRIAL else torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(sum(LONG), inputs, device=DEVICE, dtype=dtype)
    weight = torch.randn(outputs, inputs, device=DEVICE, dtype=dtype)
    together, alone = (
        x @ weight.mT,
        torch.cat([x[begin:end] @ weight.mT for begin, end in spans(LONG)]),
    )
    differ = [
        end - begin
        for begin, end in spans(LONG)
        if not torch.equal(together[begin:end], alone[begin:end])
    ]
    what = f"matrix product {outputs} x {inputs}, packed against alone"
    record(what, relative_rms(together, alone), PRODUCT, lengths_that_differ=differ)


# (outputs, inputs) of the layers' products, each of two neighbours
PUBLISHED = {
    "0.8B": [
        (6144, 1024),
        (2048, 1024),
        (16, 1024),
        (4096, 1024),
        (512, 1024),
        (3584, 1024),
        (1024, 3584),
        (1024, 2048),
    ],
    "2B": [(6144, 2048), (2048, 2048), (16, 2048), (4096, 2048), (512, 2048), (2048, 6144)],
    "4B": [
        (9216, 2560),
        (2560, 9216),
        (8192, 2560),
        (4096, 2560),
        (32, 2560),
        (1024, 2560),
        (2560, 4096),
    ],
    "9B": [(8192, 4096), (4096, 4096), (32, 4096), (1024, 4096), (12288, 4096), (4096, 12288)],
    # other blocks of the kernel of narrow products
    "none": [(64, 2048), (100, 2048), (127, 1000)],
    "27B": [
        (17408, 5120),
        (5120, 17408),
        (12288, 5120),
        (10240, 5120),
        (6144, 5120),
        (48, 5120),
        (1024, 5120),
        (5120, 6144),
    ],
}
ROWS = (1, 65, 129, 257, 320, 576, 1000, 1025, 1280, 1536, 2000, 2560, 3072, 3978, 5567, 12288)


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_token_gets_the_same_bits_in_a_projection_of_any_number_of_rows(size, record):
    """What the bits of dense models rest on: `hf_packfree.ops.fused.linear` on torch's matrix
    library.
    """
    torch.manual_seed(0)
    dtype, rows = (torch.float32, 400) if TRIAL else (torch.bfloat16, TOKENS)
    for outputs, inputs in PUBLISHED[size][:: 5 if TRIAL else 1]:
        x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
        weights = [torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) for _ in range(2)]
        differ, worst = [], 0.0
        whole = projections(x, *weights, backend="triton, batch-invariant")
        for count in (count for count in ROWS if count < rows):
            some = projections(x[:count], *weights, backend="triton, batch-invariant")
            errors = [relative_rms(part, all_of_it[:count]) for part, all_of_it in zip(some, whole)]
            worst, differ = max(worst, *errors), differ + [count] * any(errors)
        what = f"projection {outputs} x {inputs}, {size}: fewer rows against {rows}"
        record(what, worst, PRODUCT if TRIAL else 0.0, lengths_that_differ=differ)


def test_flash_qlas_plans_are_its_own():
    """Which we make with fewer operations, for the releases that we know."""
    if (reason := OPS["delta rule"].unusable("flash_qla", torch.bfloat16)) is not None:
        pytest.skip(reason)
    from flash_qla.utils.index import prepare_varlen_metadata

    for lengths in ([1], [64], LONG, [65, 1, 2000, 64, 63] * 3, [64] * 500):
        packed = record_of(lengths)
        found, wanted = (
            planned_cu_seqlens(packed),
            prepare_varlen_metadata(packed.cu_seqlens.clone(), packed.cu_seqlens_cpu),
        )
        assert torch.equal(found, wanted)
        for ours, theirs in zip(
            found._flash_qla_prepared_varlen, wanted._flash_qla_prepared_varlen, strict=True
        ):
            if isinstance(ours, torch.Tensor):
                assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, lengths
            else:
                assert ours == theirs, lengths


def test_every_operation_is_here():
    for name in ("delta rule", "conv", "attention"):
        assert "torch" in OPS[name].backends()
