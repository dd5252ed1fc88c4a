"""Convert a checkpoint, one matrix at a time.

A few matrices are in flight, each read, requantised and written by one thread. `target` has already decided what is
written where; this module moves the values, rounds only where the target spec requires it, and records the error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path

import torch
from torch import Tensor

from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.naming import GATE, UP
from lancebill.checkpoint.resolve.other_modules import OtherModule, quantized_modules, row_chunks
from lancebill.checkpoint.resolve.stored_layer import Projection
from lancebill.checkpoint.worker_threads import map_in_order
from lancebill.checkpoint.write.output import Job, Output
from lancebill.checkpoint.write.plan_output import GGUF, plan_output
from lancebill.checkpoint.write.rest import RestModule
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.checkpoint.write.target import Target
from lancebill.errors import MixedSpecs, UnsupportedFormat
from lancebill.formats.base import Scheme
from lancebill.numbers.codec import dequantize, keeps_codes, loss, plain_matrix, quantize, recasts, requantize
from lancebill.numbers.loss import Loss
from lancebill.numbers.scales import FLOOR
from lancebill.numbers.search import can_search, search_pays
from lancebill.numbers.spec import DENSE_BF16, DENSE_F32, TENSOR, QuantSpec
from lancebill.numbers.weight import FACTORS, INPUT_ROLES, LogicalWeight, stack

COPY_BYTES = 32 << 20  # chunk size for tensors that are copied unchanged

Progress = Callable[[int], None]


@dataclass
class Report:
    """What was written, and the quantisation error."""

    target: Target
    layers: dict[int, Loss] = field(default_factory=dict)
    source_bytes: int = 0  # stored size of the experts read
    written_bytes: int = 0  # size of all tensors written
    copied: int = 0  # tensors copied byte for byte
    recast: tuple[str, ...] = ()  # modules outside the experts re-encoded exactly
    dequantized: tuple[str, ...] = ()  # modules outside the experts that became unquantised
    dropped: dict[str, int] = field(default_factory=dict)  # activation scales not written, by role
    unread: str | None = None  # why transformers itself cannot load the output, where that is known

    @property
    def total(self) -> Loss:
        total = Loss()
        for part in self.layers.values():
            total = total.merge(part)
        return total


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion: device, choice of scales, overwriting, and whether to write only the experts."""

    device: str = "cpu"
    mx_rule: str = FLOOR
    search: bool | None = None  # None: for the specs of `search_pays`
    overwrite: bool = False
    experts_only: bool = False

    def searches(self, spec: QuantSpec) -> bool:
        """Whether scales of this spec are searched."""
        return search_pays(spec) if self.search is None else self.search and can_search(spec)


def plan_conversion(
    source: Checkpoint, target: Target, options: ConvertOptions, rest: Iterable[RestModule] = ()
) -> Output:
    """Check the source and plan the output; reads headers only. `rest`: modules outside the experts as a model has
    them."""
    manifest = manifests.build(source.config, source.headers)
    manifest.check(str(source.path), allowed=(MixedSpecs,))  # every matrix is converted by itself
    if manifest.naming.family == GGUF and not options.experts_only:
        raise UnsupportedFormat(
            "only the experts of a GGUF file can be converted: the names and layouts of its other tensors differ",
            where=str(source.path),
            hint="--experts-only writes a checkpoint that holds only the experts",
        )
    others = [] if options.experts_only else quantized_modules(manifest, source.headers, source.read)
    return plan_output(manifest, target, source.headers, others, rest=rest, experts_only=options.experts_only)


def convert(
    source: Checkpoint,
    destination: str | Path,
    output: Output,
    options: ConvertOptions,
    progress: Progress = lambda _: None,
) -> Report:
    """Write `output`; calls `progress` with the number of source bytes processed."""
    report = Report(output.target, copied=len(output.copied), source_bytes=_expert_bytes(source, output))
    report.unread = output.unread
    report.dropped = _dropped_inputs(output)
    report.recast = tuple(module.module for module in output.recast)
    report.dequantized = tuple(module.module for module in output.dequantized)
    with CheckpointWriter(destination, output.tensors, source=source.path, overwrite=options.overwrite) as out:
        out.write_json("config.json", output.config)
        for file in () if options.experts_only else source.other_files():
            out.copy_file(file)
        for name in output.copied:
            _copy(source, name, out, progress)
        for module in output.dequantized:
            _write_plain(source, module, output.plain_scheme, out, options)
            progress(_bytes(source, module))
        for module in output.recast:
            weight = load_projection(source.read, module)
            _write_module(module, output.scheme, output.scheme.encode(fit_to_scheme(weight, output.scheme)[0]), out)
            progress(_bytes(source, module))
        for written in output.rest:
            _write_module(written.module, written.scheme, written.encode(source.read), out)
            progress(_bytes(source, written.module))
        _ExpertConverter(source, output, options, out, report, progress).convert_all()
    report.written_bytes = sum(shard.size for shard in out.shards)
    return report


def work_bytes(source: Checkpoint, output: Output) -> int:
    """The total of all `progress` calls."""
    rest = (written.module for written in output.rest)
    modules = sum(_bytes(source, module) for module in (*output.dequantized, *output.recast, *rest))
    return sum(source.tensors[name].nbytes for name in output.copied) + modules + _expert_bytes(source, output)


class _ExpertConverter:
    """Converts the experts of a checkpoint."""

    def __init__(
        self,
        source: Checkpoint,
        output: Output,
        options: ConvertOptions,
        out: CheckpointWriter,
        report: Report,
        progress: Progress,
    ) -> None:
        self.source, self.output, self.options = source, output, options
        self.out, self.report, self.progress = out, report, progress

    def convert_all(self) -> None:
        for jobs, cost in map_in_order(self._convert, _together(self.output)):
            self.report.layers[jobs[0].layer] = self.report.layers.get(jobs[0].layer, Loss()).merge(cost)
            self.progress(sum(_bytes(self.source, p) // _shares(p) for job in jobs for p in job.sources))

    def _convert(self, jobs: Sequence[Job]) -> Loss:
        """Read, requantise and write the output modules of one expert; returns their quantisation error."""
        device = torch.device(self.options.device)
        loaded = [load_projection(self.source.read, p).to(device) for job in jobs for p in job.sources]
        fitted, cost = self._fit(loaded)
        for job in jobs:
            parts, fitted = fitted[: len(job.sources)], fitted[len(job.sources) :]
            weight = parts[0] if len(parts) == 1 else stack(parts)
            if len(parts) > 1 and job.form.interleaved:
                weight = weight.rows(torch.arange(weight.n, device=weight.device).view(2, -1).t().reshape(-1))
            self._write(job, self.output.scheme.encode(weight))
        return cost

    def _fit(self, weights: Sequence[LogicalWeight]) -> tuple[list[LogicalWeight], Loss]:
        """The weights in the target's spec; gate and up with one scale, if the spec has a scale of whole matrices."""
        scheme, options, cost, fitted = self.output.scheme, self.options, Loss(), []
        joined = [_join_values(weights)] if len(weights) > 1 and _share_scale(weights, scheme.spec) else list(weights)
        for weight in joined:
            result, part = fit_to_scheme(weight, scheme, options.mx_rule, search=options.searches(scheme.spec))
            fitted.append(result.to(torch.device("cpu")))
            cost = cost.merge(part)
        if len(fitted) < len(weights):
            ends = [0, *accumulate(weight.n for weight in weights)]
            fitted = [fitted[0].cut(rows, (0, fitted[0].k)) for rows in pairwise(ends)]
        return fitted, cost

    def _write(self, job: Job, tensors: Mapping[str, Tensor]) -> None:
        for role, tensor in tensors.items():
            name, expert = self.output.place(job, role)
            tensor = tensor.t() if self.output.flipped(job, role) else tensor
            if expert is None:
                self.out.write(name, tensor)
            elif job.form.flat and tensor.ndim:
                self.out.write(name, tensor, expert * tensor.shape[0])
            else:
                self.out.write(name, tensor.unsqueeze(0), expert)


def _together(output: Output) -> list[tuple[Job, ...]]:
    """The jobs that are converted at the same time: gate and up of an expert, if they get one scale."""
    if not _tensor_scales(output.scheme.spec):
        return [(job,) for job in output.jobs]
    halves = (GATE, UP)
    groups = groupby(output.jobs, lambda job: (job.layer, job.expert, job.stored in halves or job.stored))
    return [tuple(jobs) for _, jobs in groups]


def _tensor_scales(spec: QuantSpec) -> bool:
    """Whether a scale of whole matrices is stored. Runtimes take one for gate and up, which they multiply as one."""
    return any(level.block == TENSOR and level.dtype.wide is not None for level in spec.scales)


def _share_scale(weights: Sequence[LogicalWeight], spec: QuantSpec) -> bool:
    """Whether gate and up are fitted together: not where each of them stays as it is."""
    return _tensor_scales(spec) and not all(recasts(w.spec, spec) or keeps_codes(w.spec, spec) for w in weights)


def _join_values(weights: Sequence[LogicalWeight]) -> LogicalWeight:
    """The values of gate over up, unquantised, in natural column order."""
    return stack([weight if weight.spec == DENSE_BF16 else _unquantized(weight) for weight in weights])


def _unquantized(weight: LogicalWeight) -> LogicalWeight:
    return LogicalWeight(DENSE_F32, plain_matrix(weight), bias=weight.bias)


def fit_to_scheme(
    weight: LogicalWeight, scheme: Scheme, mx_rule: str = FLOOR, *, search: bool = False
) -> tuple[LogicalWeight, Loss]:
    """The weight in the spec of `scheme`, exact where possible, and its quantisation error.

    Output checkpoints are weight-only: activation scales are dropped, and a pre-quantisation scale is multiplied into
    the weights.
    """
    spec = scheme.spec
    if FACTORS in weight.inputs:
        weight = _unquantized(weight)
    weight = replace(weight, inputs={})
    result, cost = requantize(weight, spec, mx_rule=mx_rule, search=search, keep_order=scheme.act_order)
    if scheme.zeros_beyond(result) is None:
        return result, cost
    source = dequantize(weight)
    result = replace(quantize(source, spec, mx_rule=mx_rule, search=search), bias=weight.bias)
    return result, loss(source, result)


def _copy(source: Checkpoint, name: str, out: CheckpointWriter, progress: Progress) -> None:
    """Copy a tensor byte for byte, a large one in chunks of rows."""
    info = source.tensors[name]
    if info.nbytes <= COPY_BYTES or not info.shape:
        out.write(name, source.read(name))
        progress(info.nbytes)
        return
    rows = max(1, COPY_BYTES * info.shape[0] // info.nbytes)
    for first in range(0, info.shape[0], rows):
        part = source.read(name, (slice(first, first + rows),))
        out.write(name, part, first)
        progress(part.nbytes)


def _write_plain(
    source: Checkpoint, module: OtherModule, scheme: Scheme, out: CheckpointWriter, options: ConvertOptions
) -> None:
    """Dequantise a module outside the experts, in chunks of rows."""
    codes = scheme.part("codes")
    assert codes is not None
    for first, chunk in row_chunks(module):
        loaded = replace(load_projection(source.read, chunk).to(torch.device(options.device)), bias=None)
        fitted = fit_to_scheme(loaded, scheme)[0].to(torch.device("cpu"))
        out.write(module.module + codes.suffix[0], fitted.codes, first)
    bias = module.sources.get("bias")
    if bias is not None:
        out.write(f"{module.module}.bias", source.read(bias.tensor))


def _write_module(module: OtherModule, scheme: Scheme, tensors: Mapping[str, Tensor], out: CheckpointWriter) -> None:
    """Write the tensors of a quantised module outside the experts."""
    for role, tensor in tensors.items():
        part = scheme.part(role)
        assert part is not None
        out.write(module.module + part.suffix[0], tensor)


def _dropped_inputs(output: Output) -> dict[str, int]:
    """The number of activation scales that are not in the output, by role."""
    projections = [p for job in output.jobs for p in job.sources]
    dropped = {
        (role, part.tensor, part.expert)
        for p in (*projections, *output.recast, *output.dequantized)
        for role, part in p.sources.items()
        if role in INPUT_ROLES
    }
    return dict(Counter(role for role, _, _ in sorted(dropped, key=str)))


def _bytes(source: Checkpoint, projection: Projection) -> int:
    """Stored bytes of a projection: of stacked tensors, this expert's part."""
    total = 0
    for part in projection.sources.values():
        info = source.tensors[part.tensor]
        experts = 1 if part.expert is None else info.shape[0] // (part.rows_per_expert or 1)
        total += info.nbytes // experts
    return total


def _shares(projection: Projection) -> int:
    """How many projections share a stored module: 2 for a fused gate and up, else 1."""
    return projection.stored_n // projection.n


def _expert_bytes(source: Checkpoint, output: Output) -> int:
    return sum(_bytes(source, p) // _shares(p) for job in output.jobs for p in job.sources)
