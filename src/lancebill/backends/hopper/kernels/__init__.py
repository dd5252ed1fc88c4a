"""GPU kernel sources and the packed weight layouts they read.

Plain Python and torch, tested on a CPU: `weight_form` lists the weight forms, `unpack_ptx` and `unpack_ptx_fp8`
generate the PTX that turns packed codes into numbers, `fragment_order` places each code and scale in memory.
The rest needs Triton: `dequant`, `mainloop`, `gemm`, `decode` and `epilogue` (Gluon, Hopper only), and
`dispatch_combine` (plain Triton: dispatch, permutation, row quantisation, combine).
"""
