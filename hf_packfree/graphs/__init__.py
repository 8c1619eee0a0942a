"""CUDA graphs of a text model's layers: captured once for rows of about one length, replayed for
any documents in them.

A step of few tokens waits for the host, which starts some 60 kernels a layer. A captured graph
starts them all at once, with the addresses and sizes that they had; what differs from row to row
(offsets, plans, positions, embeddings) is therefore data at fixed addresses, of fixed sizes:

- `bucket`: a row is padded to a bucket by one document at its end; offsets and plans to a bound.
  So are the rows that operations make of a tree: its paths, and each of its levels.
- `captured_sequence`: every plan that a captured kernel reads is made anew for each row and written
  where the kernel reads it. A plan of another size or kind, and whatever else would have to be
  known on the host, keeps a row out of the graph.
- `capture`: the two graphs of a bucket, forward and backward, and their place in autograd.
- `gradient_buffers`: what leaves the backward graph, without a copy.
- `checkpointing`: layers that the backward pass runs once more.
- `settings`: what a graph depends on apart from its inputs; if that changes, it is captured anew.
- `runner`: which rows are replayed, which are not, and why.
"""
