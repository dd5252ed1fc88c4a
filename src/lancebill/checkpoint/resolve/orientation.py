"""Which parts of a matrix that is stored transposed are stored transposed too."""

from __future__ import annotations

from lancebill.formats import axes as ax

COLUMN = "n 1"  # the axes of one number for each row of a matrix


def orientations(axes: str, transposed: bool) -> tuple[bool, ...]:
    """Whether a part may be stored reversed.

    Next to transposed matrices, other parts have either shape. Llama-4's fp8 experts have scales [1, N] for one matrix
    and [N, 1] for the other; ModelOpt turns packed codes and their scales too, other tools do not.
    """
    if not transposed:
        return (False,)
    if is_matrix_like(axes):
        return (True,)
    both = axes == COLUMN or [axis.symbol for axis in ax.parse(axes)] == ["n", "k"]
    return (False, True) if both else (False,)


def is_matrix_like(axes: str) -> bool:
    """Whether every transposed export transposes a part with these axes: matrices and block scales."""
    parsed = ax.parse(axes)
    return (
        len(parsed) == 2
        and all(a.symbol in ("n", "k") for a in parsed)
        and len({a.per > 1 for a in parsed}) == 1
        and not any(a.packed for a in parsed)
    )
