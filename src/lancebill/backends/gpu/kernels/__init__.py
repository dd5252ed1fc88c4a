"""GPU kernel sources that all GPU backends share, and the packed weight layouts they read.

Plain Python and torch, tested on a CPU: `weight_form` lists the weight forms, `unpack_ptx` and `unpack_ptx_fp8`
generate the PTX that turns packed codes into numbers, `fragment_order` places each code and scale in memory.
The rest needs Triton: `dequant`, `decode_chunks` and `epilogue` (Gluon), and `dispatch_combine`, `route` and
`pack_codes`, `pack_scales` (plain Triton: dispatch, permutation, row quantisation, combine; routing; packing).
"""
