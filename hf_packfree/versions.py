"""Every release that this package needs, was tested with or refuses, and why. This file is the only
place of these versions.

The operations, the doctor, the report and error messages read this table; `tests/test_versions.py`
compares it with setup.cfg. Differences between releases of transformers that our layers depend on
are in `models/compat.py`. This file does not need torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Versions:
    """The releases of one package that are needed and tested.

    Attributes:
        name: the distribution, as pip installs it.
        floor: the oldest supported release; None: any.
        why: why older releases are not supported, as the end of the sentence "releases before it
            ...".
        cpu: the oldest and the newest release that the tests ran with on CPUs; for triton and
            mamba-ssm, in Triton's interpreter.
        gpu: the releases that tests/gpu ran with.
        batch_invariant: the prefix of the versions with which packed documents were compared bit
            for bit with documents run alone.
    """

    name: str
    floor: str | None = None
    why: str = ""
    cpu: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    batch_invariant: str | None = None

    @property
    def requirement(self) -> str:
        """The requirement for pip, with the floor if there is one: "flash-qla>=0.1.3"."""
        return f"{self.name}>={self.floor}" if self.floor else self.name

    @property
    def install(self) -> str:
        """The command that installs the package, or replaces a release below the floor."""
        return f"pip install '{self.requirement}'" if self.floor else f"pip install {self.name}"


VERSIONS = {
    row.name: row
    for row in (
        Versions("python", "3.10", cpu=("3.10", "3.13")),
        Versions(
            "torch",
            "2.10",
            "have no torch.nn.attention.varlen",
            cpu=("2.10.0", "2.15.0"),
            gpu=("2.11.0",),
            batch_invariant="2.11.",
        ),
        Versions("numpy", "1.24", cpu=("1.24.0", "2.4.6")),
        Versions(
            "transformers",
            "5.2",
            "lack one of the families",
            cpu=("5.2.0", "5.24.0"),
            gpu=("5.23.0",),
        ),
        Versions("accelerate", "1.10", cpu=("1.10.0", "1.15.0")),
        Versions("packaging", "23", cpu=("23.0", "26.3")),
        Versions("rich", "13", cpu=("13.0.0", "15.0.0")),
        Versions(
            "triton",
            "3.6",
            "come with a torch before 2.10",
            cpu=("3.6.0", "3.9.0"),
            gpu=("3.6.0",),
            batch_invariant="3.6.",
        ),
        Versions(
            "fla-core",
            "0.6.0",
            "were never run with packed rows on a GPU, and those before 0.5.2 compute some of them "
            "wrong",
            gpu=("0.6.0",),
            batch_invariant="0.6.0",
        ),
        Versions(
            "flash-qla",
            "0.1.3",
            "take no plan of packed rows",
            gpu=("0.1.3",),
            batch_invariant="0.1.3",
        ),
        Versions(
            "causal-conv1d",
            "1.6.0",
            "do not heed torch.use_deterministic_algorithms",
            gpu=("1.7.0",),
        ),
        Versions(
            "mamba-ssm",
            "2.3.2",
            "were never run with packed rows",
            cpu=("2.3.2.post1", "2.3.2.post1"),
        ),
    )
}

FLA_BACKWARD_WRONG_ON_HOPPER = ("3.4.0", "3.7.1")
"""From the first of these versions up to, but without, the second, Triton compiles FLA's gated
backward wrongly on Hopper (FLA's issue 640).
"""

HOPPER_ADVICE = (
    "pip install flash-qla or tilelang, and nvcc with it, or "
    f"'triton>={FLA_BACKWARD_WRONG_ON_HOPPER[1]}' with a torch that takes it"
)
"""What to install on Hopper with such a version of Triton; nvcc is part of the CUDA toolkit."""

FLA_WITHOUT_CUDA_SINCE = "5.15"
"""The first release of transformers that calls fla-core for unpacked rows without checking for a
CUDA device.
"""

VARLEN_GROUPS_HEADS = "2.11"
"""The first release of torch whose varlen attention takes fewer key heads than query heads."""

VARLEN_HAS_WINDOWS = "2.11"
"""The first release of torch whose varlen attention has `window_size`."""

VARLEN_MAY_BE_CUDNN = "2.14"
"""The first release of torch whose varlen attention may choose cuDNN instead of FlashAttention."""

VARLEN_HEEDS_SDPA_KERNEL = "2.15"
"""The first release of torch whose varlen attention uses the backend that `sdpa_kernel` names."""

LAUNCHED_TRITON = ("3.6.", "3.7.", "3.8.", "3.9.")
"""The prefixes of the versions of Triton whose compiled kernels we start without Triton's own
launcher.
"""
