"""The closed tree of errors.

Every error a user can cause is one of these and carries the same five facts: what went wrong,
where, what was expected, what was found, and what to do next. `assert` is left for our own bugs.
"""

from __future__ import annotations

from collections.abc import Iterable


class LancebillError(Exception):
    """Base of everything lancebill raises on purpose."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = None if expected is None else str(expected)
        self.got = None if got is None else str(got)
        self.hint = hint
        super().__init__(self.render())

    def render(self) -> str:
        """One line: the facts that are known, in a fixed order."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.got is not None:
            text += f"; got {self.got}"
        if self.hint is not None:
            text += f" ({self.hint})"
        return text

    def within(self, where: str) -> LancebillError:
        """The same error with its place told more fully: `where`, then what it knew itself."""
        place = where if self.where is None else f"{where}, {self.where}"
        return type(self)(self.what, where=place, expected=self.expected, got=self.got, hint=self.hint)

    def facts(self) -> dict[str, str | None]:
        """The same facts for `--json`."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "expected": self.expected,
            "got": self.got,
            "hint": self.hint,
        }


class SpecError(LancebillError):
    """A spec name or a QuantSpec that does not make sense."""


class CheckpointError(LancebillError):
    """The files are at fault."""


class MalformedFile(CheckpointError):
    """A header, an offset, a size or a JSON document that cannot be right."""


class MissingTensor(CheckpointError):
    """Required by the format, absent from the files."""


class UnexpectedTensor(CheckpointError):
    """Present under an expert's name, claimed by no part of the format."""


class DuplicateTensor(CheckpointError):
    """The same tensor is stored twice."""


class WrongShape(CheckpointError):
    """A stored shape that disagrees with the declared axes."""


class WrongDtype(CheckpointError):
    """A stored dtype the format does not allow for this part."""


class BadValue(CheckpointError):
    """A stored number that cannot be right: a NaN scale, a zero point out of range."""


class CheckpointProblems(CheckpointError):
    """Everything that is wrong with a checkpoint, reported together."""

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
    """No format matches, more than one does, or a config says something not understood."""


class CannotEncode(LancebillError):
    """A weight the target format has no form for."""


class ShardError(LancebillError):
    """A parallel layout that the sizes do not allow; names the legal ones."""


class RanksDisagree(LancebillError):
    """Ranks of one group that chose differently where they must be alike; names the odd ones."""


class UnsupportedProblem(LancebillError):
    """No backend can, or the one asked for cannot; the text is the table of reasons."""


class LaunchError(LancebillError):
    """Arguments at the boundary of a call that do not fit the layer: shape, dtype, device."""


class WrongResult(LancebillError):
    """A computed result that the reference contradicts: a defect of a backend or of a peer."""


class CompileError(LancebillError):
    """A kernel that does not compile, or compiles to something that must not ship."""


class MissingKernel(LancebillError):
    """Compiling is forbidden and the kernel is in no cache."""


class CacheError(LancebillError):
    """A folder of compiled kernels that is not this user's alone, or that cannot keep them."""


class DriverError(LancebillError):
    """The CUDA driver is missing or refused a call."""


class ContextError(DriverError):
    """The calling thread has not used the GPU yet."""
