"""Operations on packed rows: a folder per op, with a PyTorch reference and a file per backend;
small ops are files in `fused/`.
"""
