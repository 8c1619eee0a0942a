"""The table of operations. To add an operation, add a folder or a file with its `Op`, and a line
here.
"""

from __future__ import annotations

from typing import Any

from hf_packfree.ops import attention, conv, delta_rule, fused, kda, loss, ssd
from hf_packfree.ops.attention import towers
from hf_packfree.ops.op import Op

OPS: dict[str, Op[Any]] = {
    op.name: op
    for op in (
        conv.OP,
        delta_rule.OP,
        kda.OP,
        ssd.OP,
        attention.OP,
        fused.OP,
        loss.OP,
        towers.OP,
    )
}
