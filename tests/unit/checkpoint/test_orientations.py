"""Families whose stacked matrices have either orientation: a form that fits is found."""

from __future__ import annotations

import pytest

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve.naming import NameForm, find_family
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.testing.checkpoints import generate, small_size

ROW = find_family({"model_type": "qwen3_vl_moe"})
STACKED = [form for form in ROW.forms if form.stacked]
# Quark itself stores group integers as [K, N], so the shape of a matrix alone does not tell.
EXAMPLES = list(registry()["quark"].examples())


@pytest.mark.parametrize("form", STACKED, ids=lambda form: str(ROW.forms.index(form)))
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_form_that_fits_is_found(example: Example, form: NameForm) -> None:
    made = generate(example, ROW, form, small_size(example))
    assert not [problem.render() for problem in manifests.build(made.config, made.headers, ROW).problems]
