"""Kernels of elastic layers, on the CPU and by Triton."""
