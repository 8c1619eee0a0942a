"""The Triton kernels of the small ops; importing one needs triton, so only host code that is
about to launch it does.
"""
