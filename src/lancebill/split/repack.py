"""Experts from the layout of one part of a split layer into that of the other."""

from __future__ import annotations

from collections.abc import Mapping

from lancebill.moe.layout import Layout, MatrixShape, Packed


def repack(
    shapes: Mapping[str, MatrixShape],
    source: tuple[Layout, Mapping[str, Packed]],
    target: tuple[Layout, Mapping[str, Packed]],
) -> None:
    """Write the experts of `source` into the rows of `target`, through the canonical form. Both are (layout, rows)."""
    (old, given), (new, rows) = source, target
    for matrix, shape in shapes.items():
        new.pack(shape, old.unpack(shape, given[matrix]), rows[matrix])
        for name in given[matrix].keys() - old.storage(shape).keys():  # input scales have no layout
            rows[matrix][name].copy_(given[matrix][name])


def rows_of(packed: Mapping[str, Packed], first: int, count: int = 1) -> dict[str, Packed]:
    """Views of some experts' rows."""
    return {m: {name: tensor[first : first + count] for name, tensor in held.items()} for m, held in packed.items()}
