"""The GPUs that a wheel has compiled kernels for. Imports nothing, so that the command line knows them at once."""

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_120")
