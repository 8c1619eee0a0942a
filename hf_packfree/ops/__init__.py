"""Tensor in, tensor out: a folder per op, with PyTorch reference and a file per backend; small
ops are files in `fused/`.
"""
