"""All errors that lancebill raises on purpose.

Every error that a user can cause has one of these types and five facts: the problem, its place, the expected value,
the value found, and a hint. The text is safe to print, whatever a file contains. `assert` is
only for bugs in lancebill itself.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_FACT = 2000  # characters of a fact, or of one line of `what`: they may hold values of untrusted files


def _cut(text: str) -> str:
    """Long texts are cut. Control characters are escaped, as they could change a terminal, and so are surrogates."""
    text = text[: MAX_FACT + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= MAX_FACT else text[: MAX_FACT - 3] + "..."


class LancebillError(Exception):
    """Base class of all errors that lancebill raises on purpose."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = "\n".join(map(_cut, what.split("\n")))
        self.where = None if where is None else _cut(where)
        self.expected = None if expected is None else _cut(str(expected))
        self.got = None if got is None else _cut(str(got))
        self.hint = hint
        super().__init__(self.render())

    def render(self) -> str:
        """The facts that are set, as one line in a fixed order."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.got is not None:
            text += f"; got {self.got}"
        if self.hint is not None:
            text += f" ({self.hint})"
        return text

    def within(self, where: str) -> LancebillError:
        """The same error, with `where` put before its own location."""
        location = where if self.where is None else f"{where}, {self.where}"
        return type(self)(self.what, where=location, expected=self.expected, got=self.got, hint=self.hint)

    def facts(self) -> dict[str, str | None]:
        """The facts as a dict, for `--json`."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "expected": self.expected,
            "got": self.got,
            "hint": self.hint,
        }


class SpecError(LancebillError):
    """An invalid spec name, `QuantSpec`, device, size, routing or activation."""


class CheckpointError(LancebillError):
    """The files of a checkpoint are wrong, or cannot be read or written."""


class MalformedFile(CheckpointError):
    """An invalid header, offset, size or JSON document."""


class MissingTensor(CheckpointError):
    """A tensor that the format requires is missing."""


class UnexpectedTensor(CheckpointError):
    """A tensor is named like an expert's but is no part of the format."""


class DuplicateTensor(CheckpointError):
    """The same tensor is stored twice."""


class WrongShape(CheckpointError):
    """A stored shape does not match the sizes of the model and the axes of the format."""


class WrongDtype(CheckpointError):
    """A stored dtype is not allowed for this part of the format."""


class MixedSpecs(WrongDtype):
    """Experts of one layer, or gate and up, have different specs: no layer holds them, but they can be converted."""


class BadValue(CheckpointError):
    """A stored value is invalid: a NaN scale, a zero point out of range."""


class CheckpointProblems(CheckpointError):
    """All problems of a checkpoint, reported together."""

    SHOWN = 20

    def __init__(self, problems: Iterable[CheckpointError | ShardError], *, where: str) -> None:
        self.problems = tuple(problems)
        listed = [f"  {p.render()}" for p in self.problems[: self.SHOWN]]
        if len(self.problems) > self.SHOWN:
            listed.append(f"  ... and {len(self.problems) - self.SHOWN} more")
        count = len(self.problems)
        super().__init__("\n".join([f"{count} problem{'s' if count != 1 else ''}", *listed]), where=where)

    def within(self, where: str) -> CheckpointProblems:
        return CheckpointProblems(self.problems, where=f"{where}, {self.where}")


class UnsupportedFormat(LancebillError):
    """No format matches, several match, or a config value is not supported."""


class CustomCode(UnsupportedFormat):
    """A checkpoint cannot be loaded without running Python code that it names."""


class CannotEncode(LancebillError):
    """The target format cannot store a weight or a spec."""


class ShardError(LancebillError):
    """The sizes do not allow this parallel layout."""


class RanksDisagree(LancebillError):
    """Ranks of one group have different settings where they must agree."""


class UnsupportedProblem(LancebillError):
    """No backend, or not the requested one, supports this problem; the text lists the reasons."""


class LaunchError(LancebillError):
    """The arguments of a call do not fit the layer: shape, dtype, device."""


class NotEnoughMemory(LancebillError):
    """A GPU, or the host memory that a GPU can use, has less room than is needed."""


class QueueFull(LaunchError):
    """A server's queue holds as many answers as it may."""


class NotFinite(LancebillError):
    """A model computed NaN or infinite numbers where a token is to be chosen."""


class WrongResult(LancebillError):
    """A result differs from the reference: a bug in a backend or in a peer."""


class CompileError(LancebillError):
    """A kernel does not compile, or compiles to code that must not ship."""


class MissingKernel(LancebillError):
    """Compilation is disabled and the kernel is in no cache."""


class CacheError(LancebillError):
    """Other users can write to the kernel cache, or it cannot be written."""


class DriverError(LancebillError):
    """The CUDA driver is missing, or a driver call failed."""


class ContextError(DriverError):
    """The calling thread has no CUDA context yet."""


def ranges(numbers: Iterable[int]) -> str:
    """Layers or experts in a message: `0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
