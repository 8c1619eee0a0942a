"""What goes wrong easily when a row is cut: input formats of whole batches, ranks with nothing
of a kind, who takes part.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_packfree import apply_patches
from hf_packfree.parallel import ContextParallel
from tests.input_formats import ROW_FORMATS, ROWS_FORMATS, row_batch, rows_batch
from tests.parallel.ranks import COUNTS, batch_of, of_all_ranks, step, worst
from tests.support import relative_rms, tiny

# its name before torch 2.13
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
CUT, WHOLE = [40, 1, 22, 129, 3, 13], [52, 52, 52, 52]
"""Documents of two rows of 208 tokens, the one with a document that two ranks share, the other
without.
"""

FORMATS = [f"format: {name}" for name in ROW_FORMATS]
FORMATS += [f"format: rows, {name}" for name in ROWS_FORMATS]
NOTHING = ("no targets on the first rank", "no targets", "padding behind", "a label of its own")
NAMES = FORMATS + [f"nothing: {name}, {by}" for name in NOTHING for by in COUNTS]
"""Of every error that is measured here."""


def traps(results) -> None:
    """Put errors against one process into `results`, and counts that should be 0, for rows whose
    states are exchanged.
    """
    one, many = (tiny().double() for _ in range(2))
    apply_patches(one, unpacked="native")
    apply_patches(many, context_parallel=ContextParallel(dist.group.WORLD, gdn="state"))
    formats(results, one, many)
    ranks_with_nothing(results, one, many)
    who_takes_part(results, many)


@torch.no_grad()
def formats(results, one, many) -> None:
    """Logits, in the caller's shape, from every input format of packed and padded batches."""
    batches = [row_batch(name, CUT) for name in ROW_FORMATS]
    batches += [rows_batch(name) for name in ROWS_FORMATS]
    for name, batch in zip(FORMATS, batches, strict=True):
        found, wanted = (
            torch.cat(batch.cut(model(**batch.inputs).logits)) for model in (many, one)
        )
        results[name] = relative_rms(found, wanted)


def ranks_with_nothing(results, one, many) -> None:
    """Gradients where the first rank has no targets, no rank has any, the last has padding
    alone, or a label of its own.
    """
    row = batch_of(CUT, 1)
    late, none = (row | {"labels": row["labels"].clone()} for _ in range(2))
    late["labels"][:, :104], none["labels"][:] = -100, -100
    padded = row | {"labels": row["input_ids"].clone()}
    padded["attention_mask"] = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(CUT[:3]))[
        None
    ]
    padded["attention_mask"] = torch.nn.functional.pad(
        padded["attention_mask"], (0, 208 - sum(CUT[:3]))
    )
    padded["labels"][padded["attention_mask"] == 0] = -100
    del padded["position_ids"]
    own = batch_of([5, 9, 3], 1) | {"ignore_index": 3}
    own["labels"][own["labels"] == -100] = 3
    for name, given in zip(NOTHING, (late, none, padded, own), strict=True):
        for by, count in COUNTS.items():
            wanted, wanted_gradients = step(one, given | count)
            loss, gradients = of_all_ranks(
                many, given | count, 1 if count else dist.get_world_size()
            )
            errors = relative_rms(loss, wanted.loss, floor=1e-8), worst(gradients, wanted_gradients)
            results[f"nothing: {name}, {by}"] = max(errors)


def who_takes_part(results, many) -> None:
    """States are exchanged where a document is cut, by all ranks equally often, forward and
    backward; what ranks compare is gathered in any case.
    """
    for name, lengths in {"cut": CUT, "whole": WHOLE}.items():
        with patch.object(dist, GATHER, wraps=getattr(dist, GATHER)) as gather:
            with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
                step(many, batch_of(lengths, 1))
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, (gather.call_count, exchange.call_count))
        results[f"taking part: {name}, unequally"] = len(set(everyones)) - 1
        results[f"taking part: {name}"] = gather.call_count - 1
