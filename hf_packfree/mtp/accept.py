"""How many of the head's drafts the model confirms in greedy decoding, measured without a serving
engine.

Greedy speculative decoding gives the text of greedy decoding, so the model generates that text
first. A draft of step k counts only if the drafts before it are right, that is, equal the text. So
one pass of the head over the text gives all drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.rotary import cos_and_sin
from hf_packfree.mtp.head_options import check_depth
from hf_packfree.packing import PackedSequence


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of drafts in greedy decoding.

    Attributes:
        depth: drafts per round.
        rounds: forwards of the model that check drafts.
        per_round: drafts accepted in the average round, 0 to depth.
        by_position: share of rounds in which the first, second, ... draft was accepted.
    """

    depth: int
    rounds: int
    per_round: float
    by_position: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.1%}" for share in self.by_position)
        return (
            f"{self.per_round:.2f} of {self.depth} drafts accepted per round, over {self.rounds} "
            f"rounds; each: {shares}"
        )


@torch.no_grad()
def accepted_drafts(
    model: Any, prompts: Sequence[Tensor], *, new_tokens: int = 64, depth: int = 3
) -> Acceptance:
    """Return how many of the head's drafts a model confirms.

    Args:
        model: patched, with a head (`apply_patches(model, mtp="keep")`); in evaluation mode.
        prompts: int64 [n] each, of one token at least, on the model's device.
        new_tokens: how many tokens to generate after each prompt.
        depth: drafts per round; with more drafts than the head has layers, its layers run again on
            their own output.

    Raises:
        UnsupportedInput: the model has no head, a prompt has no tokens or is no tensor of one
            dimension, or no text has more new tokens than `depth`.
        ValueError: `depth` is no whole number of at least 1.
    """
    check_depth(depth)
    if getattr(model, "mtp", None) is None:
        raise UnsupportedInput(
            f"found a {type(model).__name__} without a multi-token prediction head; wanted one; "
            "call apply_patches(model, mtp='keep')"
        )
    accepted: list[int] = []
    for prompt in prompts:
        _check_prompt(prompt)
        ids = prompt[None]
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
        )
        accepted += rounds_over(model, text, len(prompt), depth)
    if not accepted:
        raise UnsupportedInput(
            f"found no text with more new tokens than the {depth} drafts of a round; wanted one; "
            "give more new_tokens, or less depth"
        )
    shares = tuple(
        sum(found > place for found in accepted) / len(accepted) for place in range(depth)
    )
    return Acceptance(depth, len(accepted), sum(accepted) / len(accepted), shares)


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, Tensor) or prompt.ndim != 1:
        found = list(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
        raise UnsupportedInput(
            f"found a prompt {found}; wanted a tensor of token ids [n]; pass torch.tensor(ids), "
            "and a batch as a list of its rows"
        )
    if prompt.numel() == 0:
        raise UnsupportedInput(
            "found a prompt without tokens; wanted one at least; check the text and tokenizer"
        )


def rounds_over(model: Any, text: Tensor, start: int, depth: int) -> list[int]:
    """Return the number of drafts accepted in each round, for rounds that write text [1, n] from
    token `start` on.

    A round writes its accepted drafts, and one more token that the model predicts when it checks
    them.
    """
    right = _right(model, text, depth)[start - 1 :].tolist()
    accepted, place = [], 0
    while place < len(right):
        accepted.append(right[place])
        place += 1 + right[place]
    return accepted


def _right(model: Any, text: Tensor, depth: int) -> Tensor:
    """Return int64 [n - 1 - depth]: for every token of text [1, n], how many drafts after it are
    right before the first wrong one.
    """
    trunk = model.get_decoder()
    positions = torch.arange(text.shape[1], device=text.device)[None]
    hidden = trunk(input_ids=text, position_ids=positions, use_cache=False).last_hidden_state
    packed = PackedSequence.from_lengths([text.shape[1]], device=text.device)
    # a head that is only kept stays in its checkpoint's dtype
    weight = model.mtp.fc.weight
    dtype = weight.dtype if weight.is_floating_point() else hidden.dtype
    states = model.mtp(
        hidden.to(dtype),
        trunk.get_input_embeddings()(text).to(dtype),
        packed,
        depth,
        position_embeddings=cos_and_sin(trunk, hidden.to(dtype), positions),
    )
    count = max(text.shape[1] - 1 - depth, 0)
    rights = [
        model.lm_head(state[0, :count].to(hidden.dtype)).argmax(-1)
        == text[0, step + 1 : step + 1 + count]
        for step, state in enumerate(states, start=1)
    ]
    return torch.stack(rights, -1).long().cumprod(-1).sum(-1)
