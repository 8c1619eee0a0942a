"""The graph of one bucket."""

from __future__ import annotations

from dataclasses import dataclass

from hf_packfree.graphs.bucket import Bucket, in_bucket
from hf_packfree.graphs.capture import Graph
from hf_packfree.graphs.captured_sequence import CapturedSequence
from hf_packfree.graphs.layer_graphs import LayerGraphs
from hf_packfree.graphs.unread import Plans
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.bounded import on_host


@dataclass(eq=False, repr=False)
class Captured:
    """The graph of one bucket, and the record that it was captured with.

    Attributes:
        plans: write the record's on the device; None where only the host can make them.
    """

    graph: Graph | LayerGraphs
    packed: CapturedSequence
    plans: Plans | None

    def write_for(self, packed: PackedSequence, bucket: Bucket) -> None:
        """Write the plans of a row of the bucket.

        Raises:
            OtherPlan: see `CapturedSequence.become`.
        """
        if self.plans is not None:
            self.plans.write_for(packed)
        else:
            self.packed.become(in_bucket(on_host(packed), bucket))
