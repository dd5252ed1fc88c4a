"""The headers that a checkpoint with a given config would have, for engines that start without one."""

from __future__ import annotations

from lancebill.checkpoint.resolve.naming import DOWN, GATE_UP, NameForm, Naming
from lancebill.checkpoint.resolve.orientation import is_matrix_like
from lancebill.errors import MissingTensor
from lancebill.formats import detect
from lancebill.formats.base import Part
from lancebill.formats.stored import Config, Stored

INPUT_SCALES = ("input_scale", "input_global_scale")  # optional parts that static activations need


def expected_headers(config: Config, naming: Naming, layer: int) -> dict[str, Stored]:
    """The expert tensors of one layer, as the format usually names them.

    Optional tensors are left out, except input scales and the biases of families that have them.
    """
    fmt, sizes = detect(config), naming.sizes(config.model)
    if sizes.experts is None or sizes.hidden is None or sizes.intermediate is None:
        raise MissingTensor(
            "the config does not state the size of the experts",
            where=config.source,
            expected="num_experts, hidden_size and moe_intermediate_size",
        )
    form = next((form for form in naming.forms if form.stacked == fmt.stacked), naming.forms[0])
    prefix = "model." if "model." in form.prefixes else form.prefixes[0]
    headers: dict[str, Stored] = {}
    for projection in form.names:
        n, k = (sizes.hidden, sizes.intermediate) if projection == DOWN else (sizes.intermediate, sizes.hidden)
        for expert in range(1 if form.stacked else sizes.experts):
            module = form.module(prefix, layer, expert, projection)
            for part in fmt.scheme(config, fmt.expert_module(config, module)).parts:
                if _exists(part, naming):
                    shape = _shape(part, form, projection, (2 * n if projection == GATE_UP else n, k), sizes.experts)
                    headers[module + part.usual_suffix(form.parameters)] = Stored(part.dtypes[0], shape)
    return headers


def _exists(part: Part, naming: Naming) -> bool:
    return not part.optional or part.role in INPUT_SCALES or (part.role == "bias" and naming.biased)


def _shape(part: Part, form: NameForm, projection: str, size: tuple[int, int], experts: int) -> tuple[int, ...]:
    shape = part.shapes(*size, part.dtypes[0])[0]
    if projection in form.transposed and is_matrix_like(part.axes[0]):
        shape = shape[::-1]
    if form.flat and shape:
        return experts * shape[0], *shape[1:]
    return (experts, *shape) if form.stacked else shape
