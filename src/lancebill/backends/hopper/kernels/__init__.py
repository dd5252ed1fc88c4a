"""GPU kernel sources and the bit arrangements they read.

`forms` says which weight forms exist, `ptx` and `ptx_narrow` how a form's codes become numbers in registers,
`fragments` where each code and scale lies in memory. These are plain Python and torch and are
proved on a CPU. The rest needs Triton: `dequant`, `multiply`, `gemm`, `decode` and `epilogue` (Gluon, Hopper), `rows`
(Triton: dispatch, permutation, row quantisation, combine).
"""
