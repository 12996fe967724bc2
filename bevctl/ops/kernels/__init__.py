"""Triton kernels, one file an operation; imported only where `bevctl.ops.backend` chose them."""
