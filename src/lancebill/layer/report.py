"""What a load did, as one value that prints itself for people and logs."""

from __future__ import annotations

from dataclasses import dataclass, field

from lancebill.backends.oracle import Choice
from lancebill.errors import ranges
from lancebill.numbers.loss import Loss


@dataclass(frozen=True)
class LoadReport:
    """Format, specs, bytes, time, backend and why, and what requantisation cost."""

    format: str
    family: str
    layer: int
    stored: dict[str, str]  # specs in the files, by matrix
    kept: dict[str, str]  # specs in memory
    activations: dict[str, str]
    declared_activations: dict[str, str]  # as declared, by matrix; "none" if only the other one has them
    experts: int
    bytes: int
    seconds: float
    choice: Choice
    losses: dict[str, Loss] = field(default_factory=dict)
    unknown_keys: tuple[str, ...] = ()  # config keys that the format ignores; they may change what the weights mean
    notes: tuple[str, ...] = ()  # what the backend's layout could not store exactly
    host: LoadReport | None = None  # of the experts in host memory, where the layer is split
    moves: bool = False  # experts move, and host memory has all of them
    mixture: str | None = None  # where the layer has several

    @property
    def counted(self) -> str:
        """The number of experts, with the name of their mixture."""
        return str(self.experts) if self.mixture is None else f"{self.experts} {self.mixture}"

    @property
    def host_bytes(self) -> int:
        """Bytes of the experts in host memory, which `bytes` does not count."""
        return 0 if self.host is None else self.host.bytes

    def __str__(self) -> str:
        rate = self.bytes / 1e9 / max(self.seconds, 1e-9)
        lines = [
            f"layer {self.layer}: {self.format} ({self.family}), {self.counted} experts, "
            f"{self.bytes / 2**20:.1f} MiB in {self.seconds:.2f} s ({rate:.2f} GB/s)"
        ]
        for name, kept in self.kept.items():
            how = kept if kept == self.stored[name] else f"{self.stored[name]} -> {kept}"
            loss = self.losses.get(name)
            cost = "" if loss is None else f", rms error {loss.rms_error:.2e}"
            declared = self.declared_activations[name]
            mismatch = "" if declared == self.activations[name] else f" (the checkpoint declares {declared})"
            lines.append(f"  {name}: {how}, activations {self.activations[name]}{mismatch}{cost}")
        if self.unknown_keys:
            lines.append(f"  config keys {self.format} does not know: {', '.join(self.unknown_keys)}")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {line}" for line in self.choice.table().splitlines()]
        if self.host is not None:
            backend = self.host.choice.backend.name
            size = f"{self.host.bytes / 2**20:.1f} MiB"
            which = "all {} experts, which move" if self.moves else "{} more experts"
            lines.append(f"  in host memory: {which.format(self.host.experts)}, {size}, computed by {backend}")
        return "\n".join(lines)


class LoadReports(list[LoadReport]):
    """The reports of a model's layers; prints as a table, with one row for layers that are alike.

    `not_quantised` is the dtype in which everything else is computed, and why.
    """

    not_quantised: str = ""

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], list[LoadReport]] = {}
        for report in self:
            rows.setdefault(_kind(report), []).append(report)
        table: list[tuple[str, ...]] = [("layers", "experts", "weights", "activations", "backend", "MiB", "seconds")]
        for kind, alike in rows.items():
            size, seconds = sum(r.bytes for r in alike) / 2**20, sum(r.seconds for r in alike)
            table.append((ranges([r.layer for r in alike]), *kind, f"{size:.1f}", f"{seconds:.2f}"))
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, f"what is not quantised: {self.not_quantised}"] if self.not_quantised else lines)

    __repr__ = __str__


def _kind(report: LoadReport) -> tuple[str, ...]:
    weights = [
        kept if kept == report.stored[name] else f"{report.stored[name]} -> {kept}"
        for name, kept in report.kept.items()
    ]
    inputs = list(report.activations.values())
    return report.counted, _once(weights), _once(inputs), report.choice.backend.name


def _once(names: list[str]) -> str:
    return " / ".join(dict.fromkeys(names))
