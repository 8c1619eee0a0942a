"""The balancing loss of the head's experts, over the tokens at which a depth predicts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from hf_packfree.models.base import upstream_of
from hf_packfree.models.call import Call
from hf_packfree.mtp.head import predicts
from hf_packfree.packing import PackedSequence
from hf_packfree.parallel.collectives import gather_row


@contextmanager
def router_logits(head: Any) -> Iterator[list[Tensor]]:
    """Collect the outputs of the head's routers while the block runs: logits [T, experts] per step,
    in order.
    """
    found: list[Tensor] = []
    mine = threading.get_ident()

    def keep(router: nn.Module, args: Any, output: Any) -> None:
        # not of other threads, which may train the same model
        if threading.get_ident() == mine:
            found.append(output[0] if isinstance(output, tuple) else output)

    gates = [part for name, part in head.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(keep) for gate in gates]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def wants_balance(call: Call) -> bool:
    """Whether a call of the model adds the balancing loss of its own routers."""
    asked = call.get("output_router_logits")
    return bool(getattr(call.config, "num_experts", 0)) and bool(
        getattr(call.config, "output_router_logits", False) if asked is None else asked
    )


def balance(model: Any, logits: list[Tensor], packed: PackedSequence) -> Tensor:
    """Return the balancing loss by the family's own function, times its coefficient, over the
    tokens that predict.

    Every rank of a context-parallel group gets the loss of the whole row.

    Args:
        model: the language model.
        logits: see `router_logits`.
        packed: the record of the row.
    """
    config = model.config.get_text_config()
    own: Any = import_module(upstream_of(type(model)).__module__)
    row, logits = packed.whole_row, [gather_row(one, packed) for one in logits]
    kept = tuple(
        one[predicts(row, step).to(one.device)] for step, one in enumerate(logits, start=1)
    )
    loss: Tensor = config.router_aux_loss_coef * own.load_balancing_loss_func(
        kept, config.num_experts, config.num_experts_per_tok
    )
    return loss
