"""The table of packages the doctor asks about.  To ask about one more, add a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_packfree.versions import VERSIONS, Versions


@dataclass(frozen=True)
class Requirement:
    """What the doctor looks for of one package; which releases are right is in `hf_packfree.versions`.

    Attributes:
        name: what pip installs; `other_names` are distributions that hold the same module.
        module: what is imported to see whether it works.
        purpose: what it is for.
        required: whether this package cannot do without it.
        cuda: whether it is of use on CUDA devices alone.
        floor: the oldest version that is right, and why.
    """

    name: str
    module: str
    purpose: str
    required: bool = False
    cuda: bool = False
    floor: str | None = None
    why: str = ""
    other_names: tuple[str, ...] = ()


def _row(name: str, module: str, purpose: str, **options: Any) -> Requirement:
    known = VERSIONS.get(name, Versions(name))
    return Requirement(name, module, purpose, floor=known.floor, why=known.why and f"releases before it {known.why}", **options)


REQUIREMENTS = (
    _row("torch", "torch", "runs everything", required=True),
    _row("numpy", "numpy", "plans of packed rows", required=True),
    _row("transformers", "transformers", "the models", required=True),
    _row("accelerate", "accelerate", "the Trainer", required=True),
    _row("triton", "triton", "compiles FLA's kernels and ours", cuda=True),
    _row(
        "fla-core", "fla.ops.gated_delta_rule", "delta rule kernels (flash-linear-attention)",
        cuda=True, other_names=("flash-linear-attention",),
    ),
    _row("causal-conv1d", "causal_conv1d", "convolution kernel", cuda=True),
    _row("flash-qla", "flash_qla", "delta rule kernels for compute capability 9.0, 10.0 and 10.3", cuda=True),
    _row("tilelang", "tilelang", "compiles FlashQLA's and some of FLA's kernels", cuda=True),
    _row("flash-attn", "flash_attn", "attention kernels", cuda=True),
    _row("kernels", "kernels", "kernels from the hub"),
    _row("liger-kernel", "liger_kernel", "fused losses and norms", cuda=True),
    _row("peft", "peft", "adapters"),
    _row("trl", "trl", "more trainers"),
    _row("matplotlib", "matplotlib", "the pictures of packfree demo"),
)
