"""GEMM kernels for GPUs from sm_80 on, in Gluon: mma.sync and cp.async."""
