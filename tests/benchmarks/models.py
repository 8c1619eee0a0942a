"""Models to time: built on the device in bf16, with kernels put in, and given back whole."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree import apply_patches, patch_report
from tests.benchmarks.composed import compose, put_mixers_in
from tests.benchmarks.shapes import Shape, configuration
from tests.benchmarks.timing import free


@dataclass(frozen=True)
class Variant:
    """What runs.

    Attributes:
        packfree: whether `apply_patches` is called.
        liger: "" (no), "before" or "after" `apply_patches`; "with its loss": before, and with its
            fused loss, too.
        flash_qla: whether FlashQLA may run the delta rule, ours and upstream's.
        fla_conv: whether FLA's Triton convolution stands in for upstream's, which refuses packed
            rows without causal-conv1d.
        composed: whether torch's varlen attention and FLA's gated norm stand in for upstream's.
        mixers: whether mamba-ssm's scan and FLA's KDA, given the boundaries, stand in for
            upstream's.
        backend: the argument of `apply_patches`: a name, or {operation: name}.
        batch_invariant: the argument of `apply_patches`.
        lora: the dtype of LoRA adapters on every linear layer, r=16, of a frozen model, as PEFT's
            `get_peft_model` makes them: "fp32", PEFT's default, or "bf16"; "" (none): the whole
            model is trained.
        dora: whether these adapters are DoRA.
        in_4_bits: whether the linear layers of the layers are bitsandbytes', NF4 and computing in
            bfloat16.
        fp32: whether the weights are in fp32, as `from_pretrained` leaves them where nobody asks for
            another dtype.
        checkpointing: whether layers are recomputed in the backward pass (not the reentrant way).
        cuda_graphs: the argument of `apply_patches`.
        mtp: the depth of the multi-token prediction head that is trained beside the model; 0: none.
        compiled: whether torch.compile compiles each decoder layer, as one graph.
        attention: what the model is loaded with; "": what its shape says.
    """

    packfree: bool = True
    liger: str = ""
    flash_qla: bool = True
    fla_conv: bool = False
    composed: bool = False
    mixers: bool = False
    backend: Any = "auto"
    batch_invariant: bool = False
    lora: str = ""
    dora: bool = False
    in_4_bits: bool = False
    fp32: bool = False
    checkpointing: bool = False
    cuda_graphs: str = "never"
    mtp: int = 0
    compiled: bool = False
    attention: str = ""

    def choice(self) -> Any:
        """The backends to ask for: where FlashQLA is off, FLA's delta rule."""
        if self.flash_qla or isinstance(self.backend, dict) or self.backend != "auto":
            return self.backend
        return {"delta_rule": "fla"}


def build(
    shape: Shape,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    attention: str | None = None,
) -> nn.Module:
    """Return the shape's model with random weights, in training mode; parameters are made on the
    device in `dtype`.
    """
    import transformers

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = getattr(transformers, shape.causal_lm)(
                configuration(shape, attention=attention)
            )
    finally:
        torch.set_default_dtype(before)
    return model.train()


@contextmanager
def variant_of(
    shape: Shape, variant: Variant, device: str, dtype: torch.dtype = torch.bfloat16
) -> Iterator[nn.Module]:
    """Build a model, put the variant's kernels in, and undo every global change and free the
    memory afterwards.
    """
    upstream = import_module(f"transformers.models.{shape.family}.modeling_{shape.family}")
    names = dict(vars(upstream))
    flag = os.environ.get("FLA_FLASH_QLA")
    if not variant.flash_qla:
        os.environ["FLA_FLASH_QLA"] = "0"
    model = None
    try:
        weights = torch.float32 if variant.fp32 else dtype
        model = build(shape, device, weights, attention=variant.attention or None)
        _put_in(model, shape, variant, upstream)
        for layer in model.get_submodule("model.layers").children() if variant.compiled else ():
            layer.compile(fullgraph=True, dynamic=True)
        if variant.checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        yield model
    finally:
        # Liger renames classes in upstream's module
        vars(upstream).update(names)
        _set_environment("FLA_FLASH_QLA", flag)
        del model
        free()


def _put_in(model: nn.Module, shape: Shape, variant: Variant, upstream: Any) -> None:
    _put_functions_in(upstream, variant)
    if variant.liger in ("before", "with its loss"):
        put_liger_in(model, shape.family, loss=variant.liger == "with its loss")
    if variant.composed:
        compose(model)
    if variant.packfree:
        # a package before 0.2 has no such option
        mode: dict[str, Any] = {"batch_invariant": True} if variant.batch_invariant else {}
        mode |= {"cuda_graphs": "auto"} if variant.cuda_graphs == "auto" else {}
        apply_patches(model, backend=variant.choice(), **mode, **_head(variant.mtp))
    if variant.liger == "after":
        put_liger_in(model, shape.family)
    if variant.in_4_bits:
        quantise(model)
    if variant.lora:
        put_lora_on(model, variant.lora, variant.dora)


def _put_functions_in(upstream: Any, variant: Variant) -> None:
    """Put what layers look up in upstream's module there."""
    if variant.fla_conv:
        upstream.causal_conv1d_fn = fla_convolution()
    if variant.mixers:
        put_mixers_in(upstream)


def _head(depth: int) -> dict[str, Any]:
    """Return the option of `apply_patches` for a head of that depth; packages before 0.2 have
    none.
    """
    if not depth:
        return {}
    from hf_packfree import MTPOptions

    return {"mtp": MTPOptions(from_scratch=True, depth=depth)}


def quantise(model: nn.Module, twice: bool = False) -> None:
    """Keep every linear layer but the head in 4 bits, in place, as `from_pretrained` does with a
    BitsAndBytesConfig; `twice`: the constants are quantised, too.
    """
    from bitsandbytes.nn import Linear4bit

    for name, layer in [*model.named_modules()]:
        if type(layer) is nn.Linear and name != "lm_head":
            device, dtype = layer.weight.device, layer.weight.dtype
            options = {
                "bias": False,
                "compute_dtype": dtype,
                "quant_type": "nf4",
                "compress_statistics": twice,
            }
            found = Linear4bit(layer.in_features, layer.out_features, **options)
            found.load_state_dict(layer.state_dict())
            model.set_submodule(name, found.to(dtype).to(device))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def put_lora_on(model: nn.Module, dtype: str, dora: bool) -> None:
    """Freeze the model and put PEFT's LoRA or DoRA on every linear layer but the head, in place."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora)
    get_peft_model(model, config, autocast_adapter_dtype=dtype == "fp32")


def put_liger_in(model: nn.Module, family: str, loss: bool = False) -> None:
    """Put Liger's RMSNorm and SwiGLU (for experts: its fused experts) into the model, and its
    fused loss; rope stays.
    """
    import liger_kernel.transformers as liger

    put_in = getattr(liger, f"apply_liger_kernel_to_{family}")
    put_in(model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=loss)


def fla_convolution() -> Any:
    """Return FLA's Triton convolution behind upstream's signature: x and the result are [B, C,
    T].
    """
    from fla.modules.convolution import causal_conv1d

    def convolve(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **words: Any,
    ) -> Tensor:
        offsets = words.get("cu_seq_lens_q")
        return causal_conv1d(x.mT, weight, bias=bias, activation=activation, cu_seqlens=offsets)[
            0
        ].mT

    return convolve


def what_runs(model: nn.Module) -> dict[str, Any]:
    """Return the backends of a patched model, and the experts implementation of a mixture."""
    found: dict[str, Any] = {}
    report = patch_report(model)
    if report.patched:
        found["implementations"] = dict(report.implementations)
    experts = next(
        (module for module in model.modules() if type(module).__name__.endswith("Experts")), None
    )
    if experts is not None:
        # what Liger sets on the instance
        bound = vars(experts).get("forward")
        patched = getattr(getattr(bound, "__func__", bound), "__qualname__", "")
        found["experts"] = patched.removesuffix(".forward") or model.config._experts_implementation
    return found


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def precise_products() -> Iterator[None]:
    """Multiply fp32 in fp32, in torch and in Triton. TileLang has no such switch; its fp32
    products are TF32.
    """
    name = "TRITON_F32_DEFAULT"
    before = (
        os.environ.get(name),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    os.environ[name] = "ieee"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        _set_environment(name, before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.allow_tf32 = before[2]


def pin_kernels(patch: Any) -> Callable[[str], None]:
    """Return `pin("smallest")` or `pin("largest")`: each of FLA's kernels runs in that one of its
    shapes and tunes nothing.

    Args:
        patch: pytest's MonkeyPatch, which undoes it.
    """
    from fla.modules import FusedRMSNormGated, convolution
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    assert FusedRMSNormGated and convolution and chunk_gated_delta_rule
    tuners = [
        thing
        for thing in gc.get_objects()
        if any(kind.__name__ == "Autotuner" for kind in type(thing).__mro__)
    ]
    assert tuners, "FLA tunes nothing any more"
    shapes = {id(tuner): tuner.configs for tuner in tuners}

    def pinned(which: str) -> None:
        sign = {"smallest": -1, "largest": 1}[which]

        # with few stages, so that shared memory holds the largest
        def rank(shape: Any) -> tuple[int, ...]:
            return (
                sign * math.prod(shape.kwargs.values()),
                -shape.num_stages,
                -sign * shape.num_warps,
            )

        for tuner in tuners:
            patch.setattr(tuner, "configs", [max(shapes[id(tuner)], key=rank)])

    return pinned
