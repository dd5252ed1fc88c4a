"""Builds and loads the C++ libraries of this package: the CPU kernels, and fast paths of `numbers`."""
