"""What a load did, as one value that prints itself for people and logs."""

from __future__ import annotations

from dataclasses import dataclass, field

from lancebill.backends.oracle import Choice
from lancebill.numbers.codec import Loss


@dataclass(frozen=True)
class LoadReport:
    """Format, specs, bytes, time, backend and why, and what requantisation cost."""

    format: str
    family: str
    layer: int
    stored: dict[str, str]  # specs in the files, by matrix
    kept: dict[str, str]  # specs in memory
    activations: dict[str, str]
    declared_activations: dict[str, str]  # as the checkpoint declares them
    experts: int
    bytes: int
    seconds: float
    choice: Choice
    losses: dict[str, Loss] = field(default_factory=dict)
    unknown_keys: tuple[str, ...] = ()  # config keys that the format ignores; they may change what the weights mean
    notes: tuple[str, ...] = ()  # what the backend's layout could not store exactly
    host: LoadReport | None = None  # of the experts in host memory, where the layer is split

    def __str__(self) -> str:
        lines = [
            f"layer {self.layer}: {self.format} ({self.family}), {self.experts} experts, "
            f"{self.bytes / 2**20:.1f} MiB in {self.seconds:.2f} s"
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
            lines.append(f"  in host memory: {self.host.experts} more experts, {size}, computed by {backend}")
        return "\n".join(lines)
