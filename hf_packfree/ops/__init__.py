"""Tensor in, tensor out: one room per operation, a torch twin and a file per accelerated backend."""
