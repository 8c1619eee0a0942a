"""What linear attention in chunks shares, in PyTorch: the layout of a row, decays, the triangular
system and the scans over time steps.
"""
