"""Kernels for GPUs from sm_80 on."""
