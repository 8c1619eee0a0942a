"""The Triton kernels of the small ops; importing one needs triton, so host code imports a kernel
where it launches it.
"""
