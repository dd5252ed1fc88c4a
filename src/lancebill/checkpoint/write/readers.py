"""How a conversion names the experts, so that transformers reads them, and whether it does.

The facts are in the naming table (`loads`, `below`, `own_names`, `merges`) and in the formats (`in_transformers`);
`nox -s families` compares them with what transformers loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lancebill.checkpoint.resolve.naming import REMOTE_CODE, NameForm, Naming
from lancebill.checkpoint.resolve.stored_layer import StoredLayer
from lancebill.checkpoint.write.target import Target
from lancebill.errors import CannotEncode
from lancebill.formats.base import Loading


def output_form(row: Naming, source: StoredLayer, target: Target, model_type: str) -> NameForm:
    """The form in which experts are written: one that transformers loads, if possible that of the source.

    Where it loads none: that of the source, unless the format stacks experts, or the first that the format can have.
    """
    able = [form for form in row.forms if form.gated == source.gated and _holds(form, target)]
    if not able:
        raise CannotEncode(
            f"{target.format.name} stacks experts, and the family '{row.family}' cannot name stacked tensors",
            where=target.format.name,
        )
    loaded = [form for form in row.loaded_forms(target.format.name, model_type) if form in able]
    fitting = [form for form in loaded if not form.below or source.prefix in form.below]
    options = fitting or loaded or able
    kept = loaded or not target.format.stacked
    return source.form if kept and source.form in options else options[0]


def output_prefix(source: StoredLayer, form: NameForm) -> str:
    """What is written before the names of a form: as in the source, if engines know the form there."""
    if form.below and source.prefix not in form.below:
        return form.below[0]
    if source.prefix in form.prefixes and source.form.prefixes == form.prefixes:
        return source.prefix
    return "model." if "model." in form.prefixes else form.prefixes[0]


def why_unread(
    rows: Sequence[tuple[Naming, NameForm]], target: Target, model_type: str, others: Iterable[str]
) -> str | None:
    """Why transformers cannot load what is written, if that is known; `others` are tensors outside the experts."""
    name, loading = target.format.name, target.format.in_transformers(target.spec)
    if model_type in REMOTE_CODE:
        return None
    if loading is Loading.NO:
        return f"it does not load experts that are {target.spec} in {name}"
    if any(form not in row.loaded_forms(name, model_type) for row, form in rows):
        return f"it does not load experts of model_type '{model_type}' from {name}"
    merged = next((n for n in others if loading is Loading.ALONE and any(row.is_merged(n) for row, _ in rows)), None)
    return None if merged is None else f"beside experts in {name} it cannot merge other tensors, such as {merged}"


def _holds(form: NameForm, target: Target) -> bool:
    if target.format.stacked:
        return form.stacked and not form.flat
    return not target.spec.quantized or not (form.stacked or form.fused)
