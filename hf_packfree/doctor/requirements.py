"""The table of packages the doctor asks about.  To ask about one more, add a row."""

from __future__ import annotations

from dataclasses import dataclass

from hf_packfree.ops.releases import CAUSAL_CONV1D_FLOOR, FLA_FLOOR, FLASH_QLA_FLOOR


@dataclass(frozen=True)
class Requirement:
    """What the doctor asks about one package.

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


REQUIREMENTS = (
    Requirement("torch", "torch", "runs everything", required=True, floor="2.10"),
    Requirement("transformers", "transformers", "the models", required=True, floor="5.2", why="it brought the families"),
    Requirement("accelerate", "accelerate", "the Trainer", required=True, floor="1.10"),
    Requirement("triton", "triton", "compiles FLA's kernels", cuda=True),
    Requirement(
        "fla-core",
        "fla.ops.gated_delta_rule",
        "delta rule kernels (flash-linear-attention)",
        cuda=True,
        floor=FLA_FLOOR,
        why="every release before it computes packed rows wrong, or fails on them, in at least one case",
        other_names=("flash-linear-attention",),
    ),
    Requirement(
        "causal-conv1d",
        "causal_conv1d",
        "convolution kernel",
        cuda=True,
        floor=CAUSAL_CONV1D_FLOOR,
        why="releases before it do not heed torch.use_deterministic_algorithms",
    ),
    Requirement(
        "flash-qla",
        "flash_qla",
        "delta rule kernels for compute capability 9.0, 10.0 and 10.3",
        cuda=True,
        floor=FLASH_QLA_FLOOR,
        why="releases before it take no plan of packed rows",
    ),
    Requirement("tilelang", "tilelang", "compiles FlashQLA's and some of FLA's kernels", cuda=True),
    Requirement("flash-attn", "flash_attn", "attention kernels", cuda=True),
    Requirement("kernels", "kernels", "kernels from the hub"),
    Requirement("liger-kernel", "liger_kernel", "fused losses and norms", cuda=True),
    Requirement("peft", "peft", "adapters"),
    Requirement("trl", "trl", "more trainers"),
    Requirement("matplotlib", "matplotlib", "the pictures of packfree demo"),
)
TRANSFORMERS_FLOOR = next(row.floor for row in REQUIREMENTS if row.name == "transformers")
