"""CUDA graphs of a text model's layers: captured once for rows of about the same length, and
replayed for rows with any documents.

A step of few tokens waits for the host, which launches some 60 kernels a layer. A captured graph
launches all of them at once, with the addresses and sizes of the capture. So everything that
differs from row to row (offsets, plans, positions, embeddings) is data at fixed addresses, of fixed
sizes:

- `bucketing`: which graph a row is for, and when it is captured.
- `bucket`: a row is padded to a bucket's tokens by one document at its end, and offsets and plans
  to a fixed size. So are the rows that operations build from a tree: its paths, and each of its
  levels.
- `captured_sequence`: every plan that a captured kernel reads is computed for each row and written
  where the kernel reads it. A row whose plan has another size or kind, or whose layers need other
  facts on the host, runs without the graph. `captured` is a graph with its plans, which `unread`
  writes before the host has read the row's documents.
- `capture`: the graphs of a bucket, forward and backward, and their place in autograd. `parts`: the
  backward pass is several graphs, so that DDP reduces gradients while others are computed.
- `gradient_buffers`: gradients of parameters that leave the backward graph without a copy.
- `checkpointing`: layers whose forward the backward pass runs again.
- `settings`: what a graph depends on apart from its inputs; if that changes, it is captured anew.
- `ahead`: a row's graph is launched while the host still waits for the row's documents, on plans
  that the device makes.
- fp32 weights that layers read in half precision are rounded before a replay, not in it
  (`hf_packfree.ops.rounded_weights`), and dropout has a seed from before it
  (`hf_packfree.ops.seeds`). `copies`: rows that run without a graph read the same copies.
- `whole`: all layers in one graph. `by_layer`: each in graphs of its own, where FSDP2 gathers
  weights in hooks around it; `layer_calls` notes what layers are called with, `layer_graphs`
  captures and replays them.
- `captures`: the graphs of a text model, and the memory that they share. `runner`: which rows are
  replayed, which are not, and why. `of_model`: the runners of a model.
"""
