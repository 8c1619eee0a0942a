"""FlashQLA's gated delta rule (TileLang): the fastest on Hopper, and the same on Blackwell's data
centre chips.

Its own function (`auto_cp`) cuts long documents into pieces that run in parallel, and drops what
decayed below e^-10 between them, which depends on what else is in the row; and it reads boundaries
back from the device. Here documents stay whole, and the plan is computed from the host's copy.
`flash_qla_segments` cuts long documents exactly, where a row has few of them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import Target, broken, installed, needs_cuda, needs_half, too_old
from hf_packfree.ops.fla_support import CHUNK, plan_chunks
from hf_packfree.ops.toolkit import flash_qla_off, has_nvcc
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.packing.marks import FLASH_QLA_PLAN
from hf_packfree.versions import VERSIONS

_SIZE = 128
_KNOWN = VERSIONS["flash-qla"].gpu
"""Releases whose forward and backward passes we call directly, and whose plans we compute; of other
releases the public function is called.
"""
_USED_ON = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities on which FlashQLA cuts documents into chunks of 64, as on 9.0, the one that
we tested. 0.1.3 also has kernels for 12.0 and 12.1, with chunks of 32, untested with packed rows.
"""


def unusable(target: Target) -> str | None:
    """Return why FlashQLA cannot run at `target`, or None."""
    if (reason := needs_cuda(target)) is not None:
        return reason
    if target.capability is not None and target.capability not in _USED_ON:
        return (
            "we know it to be exact on compute capability 9.0 and use it on 9.0, 10.0 and 10.3, "
            f"this is {target.gpu}"
        )
    if (reason := needs_half(target)) is not None:
        return reason
    sizes = {target.sizes.get("key_size", _SIZE), target.sizes.get("value_size", _SIZE)}
    if sizes != {_SIZE}:
        return f"it runs heads of {_SIZE} channels, the model has {sorted(sizes)}"
    return _unusable_package()


def _unusable_package() -> str | None:
    if (setting := flash_qla_off()) is not None:
        return f"{setting} in the environment turns it off"
    if find_spec("flash_qla") is None:
        return "flash-qla is not installed; pip install flash-qla"
    if (reason := too_old("flash-qla", installed("flash-qla"), "for packed rows")) is not None:
        return reason
    if not has_nvcc():
        return "TileLang compiles it with nvcc, which is missing; install the CUDA toolkit"
    return broken("flash-qla", "flash_qla")


@uncompiled
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> Tensor:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule`."""
    out, _ = _run(q, k, v, g, beta, None, packed, qk_l2norm)
    return out


@uncompiled
def with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule_with_states`."""
    return _run(q, k, v, g, beta, initial_state, packed, qk_l2norm)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> tuple[Tensor, Any]:
    """Return the output [1, T, HV, V], and the final states where there is an initial state."""
    cu_seqlens, g = packed.cached(planned_cu_seqlens), g.float()
    state = None if initial_state is None else initial_state.contiguous()
    if not qk_l2norm and is_known():
        inputs = (x.contiguous() for x in (q, k, v, g, beta))
        # TileLang launches on the current device
        with torch.cuda.device_of(q):
            return _TwoPasses.apply(*inputs, state, cu_seqlens)  # type: ignore[no-any-return]
    from flash_qla import chunk_gated_delta_rule

    options = {"use_qk_l2norm_in_kernel": qk_l2norm, "cu_seqlens": cu_seqlens, "auto_cp": False}
    if state is not None:
        options |= {"initial_state": state, "output_final_state": True}
    return chunk_gated_delta_rule(q, k, v, g, beta, **options)  # type: ignore[no-any-return]


class _TwoPasses(Function):
    """FlashQLA's forward and backward passes, without the checks and wrappers of its public
    function, whose host time shows in short rows. The final states are None without an initial
    state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        from flash_qla import chunk_gated_delta_rule_fwd

        states = {} if initial_state is None else {"initial_state": initial_state}
        options = {"scale": k.shape[-1] ** -0.5, "cu_seqlens": cu_seqlens, "auto_cp": False}
        sums, solved, out, _, final, *_ = chunk_gated_delta_rule_fwd(
            q, k, v, g, beta, output_final_state=bool(states), **states, **options
        )
        ctx.save_for_backward(q, k, v, sums, beta, solved, initial_state)
        # the same tensor of offsets: FlashQLA finds its plan in an attribute of the tensor
        ctx.options = options
        return out, final if states else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_final: Any) -> tuple[Tensor | None, ...]:
        from flash_qla import chunk_gated_delta_rule_bwd

        *saved, initial_state = ctx.saved_tensors
        q, k, v, _, beta, _ = saved
        states = {}
        if initial_state is not None:
            states = {"initial_state": initial_state, "dht": d_final.contiguous()}
        d_q, d_k, d_v, d_beta, d_g, d_initial = chunk_gated_delta_rule_bwd(
            *saved, d_out.contiguous(), **states, **ctx.options
        )
        grads = d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_g, d_beta.to(beta.dtype)
        return *grads, d_initial, None


@cache
def is_known() -> bool:
    """Whether the installed release is one whose passes we call directly."""
    return installed("flash-qla") in _KNOWN


def planned_cu_seqlens(packed: PackedSequence) -> Tensor:
    """Return the offsets with FlashQLA's plan of chunks attached, computed on the host; FlashQLA's
    own planner launches several operations for each document.
    """
    cu_seqlens = packed.cu_seqlens.clone()
    if not is_known():
        from flash_qla.utils.index import prepare_varlen_metadata

        return prepare_varlen_metadata(cu_seqlens, packed.cu_seqlens_cpu)  # type: ignore[no-any-return]
    firsts, chunks = packed.cached(plan_chunks, CHUNK)
    FLASH_QLA_PLAN.put(cu_seqlens, (CHUNK, firsts, len(chunks), chunks))
    return cu_seqlens
