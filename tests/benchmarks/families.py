"""Rows of families beside Qwen's: 32,768 packed tokens, and a batch that is a third full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from tests.benchmarks.batches import Load
from tests.benchmarks.family_shapes import FAMILY_SHAPES, family_shape
from tests.benchmarks.models import Variant
from tests.benchmarks.shapes import batch_lengths
from tests.benchmarks.workloads import Group, long_row, other_packings

PACKFREE = Variant()
STOCK = Variant(packfree=False)
_MASK = "exact, through a T x T mask"
_CONV = "FLA's Triton convolution stands in for causal-conv1d"
_SCAN = f"{_CONV}, and mamba-ssm's Triton scan for its fused one"
_VARLEN = "torch's varlen attention"
_FLASH = "flash_attention_4"


@dataclass(frozen=True)
class Row:
    """What one family is timed as, beside this package.

    Attributes:
        title: for the tables.
        packed: transformers alone on a packed row.
        packed_note: what that is, and whether it is exact.
        kernels: transformers on the padded batch with kernels put in; None: it has no use for any.
        kernels_note: which.
        composed: the fastest exact one without this package; None: there is none.
        composed_note: of what it is composed.
        backends: of an operation of its mixer, which are timed one by one.
        flash: what is timed with FlashAttention 4, patched and not, both exact; None: nothing.
    """

    title: str
    packed: Variant
    packed_note: str
    kernels: Variant | None = None
    kernels_note: str = ""
    composed: Variant | None = None
    composed_note: str = ""
    backends: tuple[tuple[str, str], ...] = ()
    flash: Variant | None = None


_SSD = (("ssd", "mamba_ssm"), ("ssd", "fla"), ("ssd", "torch"))
_MAMBA = replace(STOCK, fla_conv=True, mixers=True)
ROWS = {
    "granite4h": Row(
        "Granite 4.0 H Micro ({layers} of 40 layers)",
        _MAMBA,
        f"{_SCAN}; leaks: attention has no boundaries",
        _MAMBA,
        _SCAN,
        replace(_MAMBA, composed=True),
        f"{_SCAN}; {_VARLEN}",
        _SSD,
    ),
    "llama": Row(
        "Llama 3.2 1B ({layers} of 16 layers)",
        STOCK,
        _MASK,
        composed=replace(STOCK, composed=True, liger="before"),
        composed_note=f"{_VARLEN}, Liger's norms and SwiGLU",
        flash=Variant(liger="before", attention=_FLASH),
    ),
    "lfm2": Row(
        "LFM2 1.2B ({layers} of 16 layers)",
        replace(STOCK, fla_conv=True),
        f"{_CONV}; {_MASK}",
        replace(STOCK, fla_conv=True),
        _CONV,
        replace(STOCK, fla_conv=True, composed=True),
        f"{_CONV}; {_VARLEN}",
    ),
    "nemotronh": Row(
        "Nemotron-H 4B ({layers} of 52 layers)",
        _MAMBA,
        f"{_SCAN}; {_MASK}",
        _MAMBA,
        _SCAN,
        replace(_MAMBA, composed=True),
        f"{_SCAN}; {_VARLEN}",
        _SSD,
    ),
    "gptoss": Row(
        "gpt-oss 20B ({layers} of 24 layers)",
        STOCK,
        "eager attention; leaks: it has no boundaries",
        composed=replace(STOCK, composed=True),
        composed_note="transformers' flex attention, block masks of documents made beforehand",
        flash=Variant(attention=_FLASH),
    ),
    "kimi": Row(
        "Kimi Linear ({layers} of 27 layers, 64 of 256 experts)",
        replace(STOCK, fla_conv=True),
        f"{_CONV}; FLA's KDA; leaks: its state has no boundaries",
        replace(STOCK, fla_conv=True),
        f"{_CONV}; FLA's KDA",
        replace(STOCK, fla_conv=True, mixers=True, composed=True),
        f"{_CONV}; FLA's KDA, given the boundaries; {_VARLEN}, values padded to keys",
    ),
}
"""In the order of their importance."""
TITLES = {
    f"{name}-{kind}": f"{row.title}, {tokens}"
    for name, row in ROWS.items()
    for kind, tokens in {
        "32k-packed": "32,768 tokens in {documents} documents",
        "8x2048-padded": "8 rows of 2,048 tokens, {fill:.0%} of them real",
    }.items()
}
"""{workload: its title}, as `tests.benchmarks.report.TITLES` has them."""
SHORT_TITLES = {
    name: row.title.format(layers=FAMILY_SHAPES[name].layers) for name, row in ROWS.items()
}
"""{family: its title in the table of short steps}."""


def family_groups(tiny: bool = False) -> list[Group]:
    """Return ours and the best alternative of every family first, then transformers alone, then
    backends one by one; `tiny` shrinks models and rows.
    """
    lengths = long_row(tiny)
    stages = (_ours, _composed, _by_flash_attention, _stock, _by_backend)
    return [
        group
        for stage in stages
        for name in ROWS
        for group in stage(name, ROWS[name], tiny, lengths)
    ]


def short_family_groups(tiny: bool = False) -> list[Group]:
    """Return every family's trunk on 4,096 tokens, each step with another packing."""
    load = other_packings(tiny)["4k"]
    found = []
    for name, row in ROWS.items():
        variants = {
            "packfree": (replace(PACKFREE, cuda_graphs="auto"), ""),
            "packfree, no graphs": (PACKFREE, ""),
            "composed without packfree": (row.composed, row.composed_note),
        }
        found += [
            Group(
                family_shape(name, tiny),
                variant,
                ((f"{name}-4k, other packings", called, load),),
                note,
            )
            for called, (variant, note) in variants.items()
            if variant is not None
        ]
    return found


def import_upstream() -> None:
    """Import upstream's files before anything imports mamba-ssm, whose fused function they would
    take from then on, without what it calls.
    """
    for shape in FAMILY_SHAPES.values():
        import_module(f"transformers.models.{shape.family}.modeling_{shape.family}")


def _group(name: str, tiny: bool, variant: Variant, called: Any, note: str = "") -> Group:
    """A group of rows (variant's name, its batch)."""
    rows = tuple(
        (f"{name}-{'8x2048-padded' if load.input_format == 'padded' else '32k-packed'}", what, load)
        for what, load in called
    )
    return Group(family_shape(name, tiny), variant, rows, note)


def _third(tiny: bool) -> Load:
    lengths = batch_lengths(4, 64, 0.5) if tiny else batch_lengths(8, 2048, 0.34)
    return Load(tuple(lengths), "padded")


def _ours(name: str, row: Row, tiny: bool, lengths: tuple[int, ...]) -> list[Group]:
    called = [
        ("packfree", Load(lengths)),
        ("packfree, padded", _third(tiny)),
        ("packfree, one document", Load((sum(lengths),), "record")),
    ]
    found = [_group(name, tiny, PACKFREE, called)]
    if row.composed is not None and row.composed.liger:
        liger = replace(PACKFREE, liger=row.composed.liger)
        found.append(_group(name, tiny, liger, [("packfree+liger", Load(lengths))]))
    return found


def _composed(name: str, row: Row, tiny: bool, lengths: tuple[int, ...]) -> list[Group]:
    if row.composed is None:
        return []
    called = [("composed without packfree", Load(lengths))]
    return [_group(name, tiny, row.composed, called, row.composed_note)]


def _by_flash_attention(name: str, row: Row, tiny: bool, lengths: tuple[int, ...]) -> list[Group]:
    if row.flash is None:
        return []
    variants = {"packfree": row.flash, "unpatched packed": replace(row.flash, packfree=False)}
    note = "loaded with FlashAttention 4" + ", Liger's norms and SwiGLU" * bool(row.flash.liger)
    return [
        _group(name, tiny, variant, [(f"{what}, FlashAttention 4", Load(lengths))], note)
        for what, variant in variants.items()
    ]


def _stock(name: str, row: Row, tiny: bool, lengths: tuple[int, ...]) -> list[Group]:
    packed = [("unpatched packed", Load(lengths))]
    padded = [("unpatched padded", _third(tiny))]
    found = [
        _group(name, tiny, row.packed, packed, row.packed_note),
        _group(name, tiny, STOCK, padded, "upstream's layers as installed"),
    ]
    if row.kernels is not None:
        kernels = [("unpatched padded, kernels put in", _third(tiny))]
        found.insert(0, _group(name, tiny, row.kernels, kernels, row.kernels_note))
    return found


def _by_backend(name: str, row: Row, tiny: bool, lengths: tuple[int, ...]) -> list[Group]:
    return [
        _group(
            name,
            tiny,
            replace(PACKFREE, backend={op: backend}),
            [(f"packfree, {op} by {backend}", Load(lengths))],
        )
        for op, backend in row.backends
    ]
