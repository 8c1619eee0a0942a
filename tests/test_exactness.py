"""Packed rows equal a forward per document: values and gradients, every input format, with a
control that fails.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from packaging.version import Version

from hf_packfree import apply_patches, remove_patches
from hf_packfree.models.compat import LAYERS_DROP_KEYWORDS, RELEASE
from hf_packfree.patching.registry import FAMILIES as TABLE
from hf_packfree.patching.registry import family_of
from tests.input_formats import ROW_FORMATS, ROWS_FORMATS, row_batch, rows_batch
from tests.support import (
    CONTROL,
    LOGIT_TOL,
    ROW,
    assert_rounding,
    by_family,
    documents_alone,
    errors,
    pairwise,
    random_weights,
    recorded,
    relative_rms,
    run,
    tiny,
)

pytestmark = pytest.mark.compat
TEXT_POSITIONS_ONLY = ("positions_4rows", "positions_3rows", "positions_3rows_flash")
FAMILIES = [row.name for row in TABLE if not row.made_from_upstream]
"""Those with a file of their own; `tests/models` has the others."""
WITH_KERNELS = ("all_flash",) if find_spec("fake_kernels") and not LAYERS_DROP_KEYWORDS else ()
"""With both kernel packages there and everything handed over, upstream itself is exact since
5.9.
"""
TEXT_IN_ANY_FIRST_ROW = Version("5.3.0") > RELEASE
BY_POSITIONS = (
    "positions",
    "positions_4rows",
    "all_flash",
    "flash_without_seq_idx",
    "starts_above_zero",
    "positions_zero_tail",
)
"""Text alone: full attention reads these positions where nothing else is there that says less."""


def measure(model, batch):
    """Return (logit error, gradient error) of the packed batch against the unpatched model per
    document.
    """
    return errors(
        run(model, batch, random_weights(batch, 128)), documents_alone(*key_of(model, batch))
    )


def key_of(model, batch):
    """The arguments of `documents_alone` for this model and these documents."""
    return (
        family_of(model).name,
        tuple(map(len, batch.documents)),
        model.config._attn_implementation,
    )


def assert_recorded(model, batch, record):
    assert_rounding(recorded(record, measure(model, batch), model, "text"))


def leaks(model, batch) -> bool:
    """Whether the unpatched model is a thousand times worse than the limit, or refuses the
    input.
    """
    wanted, _ = documents_alone(*key_of(model, batch))
    try:
        with torch.no_grad():
            found = batch.cut(model(**batch.inputs).logits)
    except (ValueError, IndexError, RuntimeError, TypeError):
        return True
    return not relative_rms(torch.cat(found), torch.cat(wanted)) <= LOGIT_TOL * CONTROL


def upstream_packs(family: str, input_format: str, attention: str) -> bool:
    """Whether upstream itself keeps documents of text apart: in families without a recurrence,
    by some formats.
    """
    if any(mixer.kind != "full_attention" for mixer in by_family[family].mixers):
        return input_format in WITH_KERNELS
    # it makes positions of a mask
    if family == "qwen3_omni_moe" and input_format in ("block_mask", "additive_block_mask"):
        return False
    if (
        family != "qwen2_5_vl"
        and TEXT_IN_ANY_FIRST_ROW
        and input_format.startswith("positions_3rows")
    ):
        return True
    by_mask = (
        input_format.startswith("additive")
        or input_format.startswith("block_mask")
        and attention == "sdpa"
    )
    reads_2d = family != "qwen2_5_vl"
    return by_mask or input_format in (BY_POSITIONS if reads_2d else ("positions_4rows",))


@pytest.mark.parametrize(
    ("family", "input_format", "attention"),
    pairwise(FAMILIES, list(ROW_FORMATS), ["eager", "sdpa"]),
)
def test_one_row(family, input_format, attention, record_property):
    if family == "qwen3_next" and input_format in TEXT_POSITIONS_ONLY:
        pytest.skip("Qwen3-Next takes no stacked positions")
    model, batch = tiny(family, attention=attention), row_batch(input_format, ROW)
    assert leaks(model, batch) != upstream_packs(family, input_format, attention), (
        "the control is not what it was: this test may not see a leak"
    )
    assert_recorded(apply_patches(model), batch, record_property)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_leaks_as_before_once_the_patches_are_removed(family):
    model, batch = apply_patches(tiny(family)), row_batch("seq_idx", ROW)
    assert not leaks(model, batch) and leaks(remove_patches(model), batch)


@pytest.mark.parametrize(
    ("family", "input_format", "attention"),
    pairwise(FAMILIES, list(ROWS_FORMATS), ["eager", "sdpa"]),
)
def test_several_rows(family, input_format, attention, record_property):
    model, batch = tiny(family, attention=attention), rows_batch(input_format)
    assert leaks(model, batch) != upstream_packs(family, input_format, attention)
    assert_recorded(apply_patches(model), batch, record_property)
