"""Multi-token prediction: the head that Qwen3.5 and Qwen3-Next checkpoints carry, which
transformers drops.
"""

from hf_packfree.mtp.accept import Acceptance, accepted_drafts
from hf_packfree.mtp.attached import training_facts
from hf_packfree.mtp.files import HeadReport, copy_head, examine
from hf_packfree.mtp.head import MTPHead
from hf_packfree.mtp.head_options import MTPOptions

__all__ = [
    "Acceptance",
    "HeadReport",
    "MTPHead",
    "MTPOptions",
    "accepted_drafts",
    "copy_head",
    "examine",
    "training_facts",
]
