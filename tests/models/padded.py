"""Padded batches of one document per row, and what a model makes of them."""

from __future__ import annotations

import torch

from tests.support import nudged, relative_rms, step, worst_gradient

WIDTH = 40
# (first place, tokens) of each row's document
ROWS = {
    "right": [(0, 40), (0, 7), (0, 21)],
    "left": [(0, 40), (33, 7), (19, 21)],
    "both": [(3, 30), (12, 7), (0, 40)],
    "one row": [(5, 20)],
    "an empty row": [(0, 9), (0, 0), (20, 20)],
}
IGNORED = -100


def padded_batch(side: str, seed: int = 5) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and the labels that transformers' collator makes: -100 at
    padding, nowhere else.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS[side]
    ids, mask = (
        torch.zeros(len(rows), WIDTH, dtype=torch.long),
        torch.zeros(len(rows), WIDTH, dtype=torch.long),
    )
    for row, (first, tokens) in enumerate(rows):
        ids[row, first : first + tokens] = torch.randint(2, 120, (tokens,), generator=generator)
        mask[row, first : first + tokens] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def real_tokens(batch) -> int:
    return int(batch["attention_mask"].sum())


class Seen:
    """Shapes of what a decoder layer and the head were given in the last forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
        layer.register_forward_hook(
            lambda module, args, output: setattr(self, "layer", tuple(args[0].shape[:2]))
        )
        head = model.get_output_embeddings()
        head.register_forward_hook(
            lambda module, args, output: setattr(self, "head", tuple(args[0].shape[:2]))
        )


def all_gradients(found, wanted) -> float:
    """Relative RMS of all parameters' gradients together."""
    assert found.keys() == wanted.keys()
    return relative_rms(
        *(torch.cat([grads[name].flatten() for name in wanted]) for grads in (found, wanted))
    )


def rounding(model, batch, grads, measure=worst_gradient, seed: int = 0, **more) -> float:
    """How far a model's gradients `grads` move, as `measure` sees it, when each weight moves by its
    last bit.

    Where a parameter's gradient is what is left of a sum that cancels, two right answers in fp32
    differ by that much.
    """
    return measure(step(nudged(model, seed), batch, **more)[1], grads)
