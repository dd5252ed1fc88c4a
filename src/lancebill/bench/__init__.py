"""The benchmark harness: backends and peers on the same work in one run, beside what the machine can do.

`workload` makes weights and routed batches, `check` compares results before anything is timed,
`timing` measures calls in turns, `ceilings` measures the machine, `peers` are other people's ways to
compute the same layer, `run` puts them together, `report` and `plot` say what came out.
"""
