"""The benchmark harness: times backends and other libraries on the same layer and compares with the machine's limits.

`workload` makes weights and routed batches, `check` compares results with the reference before anything is timed,
`timing` times calls in turns, `ceilings` measures memory and GEMM rates, `peers` wraps other libraries,
`run` combines these, `results` holds the values, `report` and `plot` write them.
"""
