"""The package humming-kernels: its products for GPUs ours do not reach, and the peer ours are measured against."""
