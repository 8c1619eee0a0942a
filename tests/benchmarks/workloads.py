"""The table of what is timed: groups of rows that share one model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.benchmarks.batches import Load
from tests.benchmarks.media import sixteen_documents
from tests.benchmarks.models import Variant
from tests.benchmarks.shapes import (
    SHAPES,
    TOKENS,
    Shape,
    batch_lengths,
    fixed_lengths,
    log_normal_lengths,
)

PACKFREE = Variant()
LIGER = Variant(liger="before")
UNPATCHED = Variant(packfree=False)
UNPATCHED_CONV = Variant(packfree=False, fla_conv=True)
COMPOSED = Variant(packfree=False, fla_conv=True, composed=True, liger="before")


@dataclass(frozen=True)
class Group:
    """Rows of one model.

    Attributes:
        shape: the model.
        variant: what runs in it.
        rows: (workload, name of the variant, batch) of each row.
        note: what the rows' reader has to know beside the shape's own note.
        in_turns: rows of one workload are timed one after the other, again and again, so that their
            ratios hold where the host is slower at times.
    """

    shape: Shape
    variant: Variant
    rows: tuple[tuple[str, str, Load], ...]
    note: str = ""
    in_turns: bool = False


PUT_IN = (
    "upstream with FLA's convolution and gated norm, torch's varlen attention, Liger's norms and "
    "SwiGLU"
)
STANDS_IN = (
    "FLA's Triton convolution stands in for causal-conv1d, without which upstream refuses packed "
    "rows"
)


def groups(tiny: bool = False, backend: Any = "auto") -> list[Group]:
    """Return every group, the important ones first; `tiny` shrinks models and rows, for a trial
    on a CPU.
    """
    found = [
        *_dense(tiny),
        *_short(tiny),
        *_under_autocast(tiny),
        *_whole_steps(tiny),
        *_with_head(tiny),
        *_twice_aslong_row(tiny),
        *_lora(tiny),
        *_padded(tiny),
        *_recomputed(tiny),
        *_with_images(tiny),
        *_linearity(tiny),
        *_wide("9b", "tiny" if tiny else "9b", tiny),
        *_wide("moe", "tiny-moe" if tiny else "moe", tiny),
    ]
    ours = [group.variant.packfree and group.variant.backend == "auto" for group in found]
    return [
        replace(g, variant=replace(g.variant, backend=backend)) if mine else g
        for g, mine in zip(found, ours)
    ]


def long_row(tiny: bool) -> tuple[int, ...]:
    """The documents of the long row."""
    return tuple(
        log_normal_lengths(400, longest=100, shortest=5) if tiny else log_normal_lengths(TOKENS)
    )


def _dense(tiny: bool) -> list[Group]:
    """The 2B shape at 32k tokens: every variant."""
    shape, lengths, name = SHAPES["tiny" if tiny else "2b"], long_row(tiny), "2b-32k-packed"
    packed, one = Load(lengths), Load((sum(lengths),), "record")
    plain = Load((sum(lengths),), "plain")
    liger = (
        (name, "packfree+liger", packed),
        (name, "packfree+liger, record given", replace(packed, input_format="record")),
        (name, "packfree+liger, one document", one),
    )
    bare = ((name, "packfree", packed), (name, "packfree, one document", one))
    triton = (
        (name, "packfree+liger, FlashQLA off", packed),
        (name, "packfree+liger, FlashQLA off, one document", one),
    )
    unpatched = ((name, "unpatched packed", packed), (name, "unpatched, one document", plain))
    return [
        Group(shape, LIGER, liger),
        Group(shape, PACKFREE, bare),
        Group(shape, replace(LIGER, flash_qla=False), triton),
        Group(shape, UNPATCHED_CONV, unpatched, STANDS_IN),
        Group(shape, COMPOSED, ((name, "composed without packfree", packed),), PUT_IN),
    ]


def _twice_aslong_row(tiny: bool) -> list[Group]:
    """The 2B shape at 64k tokens, where one document's attention is half of the step."""
    shape, name = SHAPES["tiny" if tiny else "2b"], "2b-64k-packed"
    lengths = long_row(tiny) + long_row(tiny)
    rows = {"": Load(lengths), ", one document": Load((sum(lengths),), "record")}
    ours = [
        Group(shape, variant, tuple((name, called + what, load) for what, load in rows.items()))
        for called, variant in {"packfree": PACKFREE, "packfree+liger": LIGER}.items()
    ]
    return [
        *ours,
        Group(shape, COMPOSED, ((name, "composed without packfree", rows[""]),), PUT_IN),
        Group(shape, UNPATCHED_CONV, ((name, "unpatched packed", rows[""]),), STANDS_IN),
    ]


def _whole_steps(tiny: bool) -> list[Group]:
    """The 2B shape with its head, loss and optimizer, at 32k and 8k tokens, and padded."""
    shape = SHAPES["tiny" if tiny else "2b"]
    batch = tuple(batch_lengths(4, 64, 0.5) if tiny else batch_lengths(8, 2048, 0.34))
    loads = {
        "2b-32k-whole-step": Load(long_row(tiny), whole=True),
        "2b-8k-whole-step": Load(
            tuple(log_normal_lengths(*(200,) if tiny else (8192,))), whole=True
        ),
        "2b-8x2048-whole-step": Load(batch, "padded", whole=True),
    }
    variants = {
        "packfree": (PACKFREE, ""),
        "packfree+liger": (LIGER, ""),
        "packfree+liger's fused loss": (replace(LIGER, liger="with its loss"), ""),
        "composed without packfree": (
            replace(COMPOSED, liger="with its loss"),
            f"{PUT_IN}, and Liger's fused loss",
        ),
        "unpatched packed": (UNPATCHED_CONV, STANDS_IN),
    }
    return [
        Group(
            shape,
            variant,
            tuple(
                (work, name, load) for work, load in loads.items() if not (note and "8x" in work)
            ),
            note,
        )
        for name, (variant, note) in variants.items()
    ]


def _with_head(tiny: bool) -> list[Group]:
    """Whole steps of the 2B shape at 32k tokens, beside those that train a multi-token
    prediction head too.
    """
    shape, load = SHAPES["tiny" if tiny else "2b"], Load(long_row(tiny), whole=True)
    return [
        Group(shape, replace(PACKFREE, mtp=depth), (("2b-32k-mtp", name, load),))
        for depth, name in enumerate(("packfree", "packfree, depth 1", "packfree, depth 2"))
    ]


def _lora(tiny: bool) -> list[Group]:
    """The 2B shape at 32k tokens, frozen, with adapters in fp32, which is PEFT's default, and in
    bf16.
    """
    shape, load = SHAPES["tiny" if tiny else "2b"], Load(long_row(tiny))
    variants = {
        "packfree": (PACKFREE, ""),
        "packfree+liger": (LIGER, ""),
        "composed without packfree": (COMPOSED, PUT_IN),
        "unpatched packed": (UNPATCHED_CONV, STANDS_IN),
    }
    found = [
        Group(shape, replace(variant, lora=dtype), ((f"2b-32k-lora{ending}", name, load),), note)
        for dtype, ending in (("fp32", ""), ("bf16", "-bf16"))
        for name, (variant, note) in variants.items()
        if dtype == "fp32" or name != "unpatched packed"
    ]
    found += [
        Group(shape, replace(variant, lora="fp32", dora=True), (("2b-32k-dora", name, load),), note)
        for name, (variant, note) in variants.items()
        if name.startswith(("packfree", "composed"))
    ]
    return found + [
        Group(
            shape,
            replace(variant, lora="fp32", in_4_bits=True),
            (("2b-32k-qlora", name, load),),
            note,
        )
        for name, (variant, note) in variants.items()
        if name != "unpatched packed"
    ]


def _under_autocast(tiny: bool) -> list[Group]:
    """Whole steps of the 2B shape under bf16 autocast, as the Trainer and TRL run them: LoRA on a
    base in bf16 or fp32, and every weight trained in fp32.
    """
    shape = SHAPES["tiny" if tiny else "2b"]
    long = Load(long_row(tiny), whole=True, autocast=True)
    short = replace(long, lengths=tuple(log_normal_lengths(*(200,) if tiny else (8192,))))
    variants = {
        "packfree": (PACKFREE, ""),
        "composed without packfree": (
            replace(COMPOSED, liger="with its loss"),
            f"{PUT_IN}, and Liger's fused loss",
        ),
        "unpatched packed": (UNPATCHED_CONV, STANDS_IN),
    }
    trained: dict[str, dict[str, Any]] = {
        "lora": {"lora": "fp32"},
        "lora-fp32-base": {"lora": "fp32", "fp32": True},
        "whole-step": {"fp32": True},
    }
    return [
        Group(
            shape,
            replace(variant, **options),
            ((f"2b-32k-{what}-autocast", name, long), (f"2b-8k-{what}-autocast", name, short)),
            note,
        )
        for name, (variant, note) in variants.items()
        for what, options in trained.items()
    ]


def _short(tiny: bool) -> list[Group]:
    """Steps of few tokens, each with another packing: the trunk, whole steps, and LoRA with and
    without autocast; the trunks of other shapes, and on padded rows.
    """
    trunk = other_packings(tiny)
    whole = {name: replace(load, whole=True) for name, load in trunk.items()}
    rows, width, fill = (4, 64, 0.5) if tiny else (8, 2048, 0.34)
    first, *others = (tuple(batch_lengths(rows, width, fill, seed)) for seed in range(8))
    padded = Load(first, "padded", also=tuple(others), counted=True)
    kinds: list[tuple[str, str, dict[str, Any], dict[str, Load]]] = [
        ("2b", "", {}, trunk),
        ("2b", "-whole-step", {}, whole),
        ("2b", "-lora-whole-step", {"lora": "fp32"}, whole),
        (
            "2b",
            "-lora-autocast-whole-step",
            {"lora": "fp32"},
            {name: replace(load, autocast=True) for name, load in whole.items()},
        ),
        ("9b", "", {}, {"4k": trunk["4k"]}),
        ("moe", "", {}, {"4k": trunk["4k"]}),
        ("2b", "-padded", {}, {"8x2048": padded}),
        # what runs on other GPUs than Hopper's and Blackwell's for data centres
        ("2b", "-fla", {"backend": {"delta_rule": "fla"}}, trunk),
    ]
    variants = {
        "packfree": (replace(PACKFREE, cuda_graphs="auto"), ""),
        "packfree, no graphs": (PACKFREE, ""),
        "packfree, layers compiled": (replace(PACKFREE, compiled=True), ""),
        "unpatched packed": (UNPATCHED_CONV, STANDS_IN),
    }

    groups = [
        (shape, kind, replace(variant, **options), name, loads, note)
        for shape, kind, options, loads in kinds
        for name, (variant, note) in variants.items()
    ]
    # nothing on the device has to be read there, so that no step waits for it
    groups += [
        (*group[:3], "packfree, lengths given", _given(group[4]), "")
        for group in groups
        if group[3] == "packfree" and group[1] != "-padded"
    ]
    return [
        Group(
            SHAPES["tiny" if tiny else shape],
            variant,
            tuple(
                (f"{shape}-{size}{kind}, other packings", name, load)
                for size, load in loads.items()
            ),
            note,
        )
        for shape, kind, variant, name, loads, note in groups
    ]


def other_packings(tiny: bool) -> dict[str, Load]:
    """Return {how many tokens: eight rows of that length, whose documents differ}."""
    found = {}
    for name, tokens in {"2k": 2048, "4k": 4096, "8k": 8192}.items():
        seeds = (tuple(log_normal_lengths(200 if tiny else tokens, seed=seed)) for seed in range(8))
        first, *others = seeds
        found[name] = Load(first, also=tuple(others), counted=True)
    return found


def _given(loads: dict[str, Load]) -> dict[str, Load]:
    return {size: replace(load, input_format="lengths") for size, load in loads.items()}


def _recomputed(tiny: bool) -> list[Group]:
    """The 2B shape with gradient checkpointing, at 32k tokens and at 128k, which need it."""
    shape, lengths = SHAPES["tiny" if tiny else "2b"], long_row(tiny)
    loads = {"2b-32k-checkpointing": Load(lengths), "2b-128k-checkpointing": Load(4 * lengths)}
    rows = tuple((work, "packfree", load) for work, load in loads.items())
    return [Group(shape, replace(PACKFREE, checkpointing=True), rows)]


def _padded(tiny: bool) -> list[Group]:
    """The 2B shape on 8 rows of 2,048 tokens, 34% of them real, the same packed, and rows so
    short that the GPU waits.
    """
    shape, name = SHAPES["tiny" if tiny else "2b"], "2b-8x2048-padded"
    lengths = tuple(batch_lengths(4, 64, 0.5) if tiny else batch_lengths(8, 2048, 0.34))
    padded, packed, plain = Load(lengths, "padded"), Load(lengths), Load((sum(lengths),), "plain")
    short = Load((8,) * 4 if tiny else (128,) * 8)
    liger = (
        (name, "packfree+liger, padded", padded),
        (name, "packfree+liger, packed", packed),
        ("2b-1k-packed", "packfree+liger", short),
    )
    invariant = (
        (name, "packfree+liger, padded, batch-invariant", padded),
        ("2b-1k-packed", "packfree+liger, batch-invariant", short),
    )
    stand_in = (
        (name, "unpatched padded, FLA convolution", padded),
        (name, "unpatched packed", packed),
        (name, "unpatched, one document", plain),
    )
    return [
        Group(shape, LIGER, liger, in_turns=True),
        Group(
            shape,
            PACKFREE,
            ((name, "packfree, padded", padded), (name, "packfree, packed", packed)),
            in_turns=True,
        ),
        Group(shape, replace(LIGER, batch_invariant=True), invariant),
        Group(
            shape,
            UNPATCHED,
            ((name, "unpatched padded", padded),),
            "upstream's convolution as installed",
        ),
        Group(shape, UNPATCHED_CONV, stand_in, STANDS_IN),
    ]


def _with_images(tiny: bool) -> list[Group]:
    """The 2B shape with its vision tower: documents with images padded, in one row, and parts of
    the step by themselves.
    """
    shape, name = SHAPES["tiny-vl" if tiny else "2b-vl"], "2b-vl-16docs"
    padded, packed, tower = (
        sixteen_documents(form, tiny) for form in ("padded", "offsets", "tower")
    )
    text = Load(packed.lengths)
    ours = (
        (name, "packfree, padded", padded),
        (name, "packfree, packed", packed),
        (name, "packfree, vision tower alone", tower),
        (name, "packfree, as many tokens of text", text),
    )
    unpatched = ((name, "stock, vision tower alone", tower), (name, "stock padded", padded))
    return [
        Group(shape, PACKFREE, ours, in_turns=True),
        Group(shape, UNPATCHED_CONV, unpatched, STANDS_IN),
    ]


def _linearity(tiny: bool) -> list[Group]:
    """Tokens by document length, with 8 layers, so that 131,072 tokens fit; every row is given
    its record.
    """
    shape = SHAPES["tiny"] if tiny else replace(SHAPES["2b"], layers=8)
    sizes = {"1k": 256, "2k": 512} if tiny else {"4k": 4096, "32k": TOKENS, "128k": 4 * TOKENS}
    rows = []
    for name, tokens in sizes.items():
        for length in (8, 50) if tiny else (64, 500, 8000):
            if length < tokens:
                lengths = tuple(fixed_lengths(tokens, length))
                rows.append(
                    (f"2b-8layers-{name}", f"documents of {length}", Load(lengths, "record"))
                )
        rows.append((f"2b-8layers-{name}", "one document", Load((tokens,), "record")))
    return [Group(shape, LIGER, tuple(rows), "packfree+liger; timed in turns", in_turns=True)]


def _wide(name: str, key: str, tiny: bool) -> list[Group]:
    """Another shape: at 32k tokens and 4k patched, beside one document, and unpatched; and a
    batch that is a third full.
    """
    lengths, short = long_row(tiny), tuple(fixed_lengths(*(200, 25) if tiny else (4096, 500)))
    rows = []
    for work, documents in ((f"{name}-32k-packed", lengths), (f"{name}-4k-packed", short)):
        rows += [
            (work, "", Load(documents)),
            (work, ", one document", Load((sum(documents),), "record")),
        ]
    third = Load(
        tuple(batch_lengths(4, 64, 0.5) if tiny else batch_lengths(8, 2048, 0.34)), "padded"
    )
    batch = f"{name}-8x2048-padded"
    rows.append((batch, ", padded", third))
    ours = {"packfree+liger": LIGER} | ({"packfree": PACKFREE} if name == "moe" else {})
    found = [
        Group(SHAPES[key], variant, tuple((work, called + what, load) for work, what, load in rows))
        for called, variant in ours.items()
    ]
    packed = (
        (f"{name}-32k-packed", "unpatched packed", Load(lengths)),
        (f"{name}-4k-packed", "unpatched packed", Load(short)),
    )
    padded = Group(
        SHAPES[key],
        UNPATCHED,
        ((batch, "unpatched padded", third),),
        "upstream's convolution as installed",
    )
    return [*found, Group(SHAPES[key], UNPATCHED_CONV, packed, STANDS_IN), padded]
