"""Shared parts of chunked linear attention in PyTorch: the layout of a row, decays, the triangular
system and the scans over time steps.
"""
