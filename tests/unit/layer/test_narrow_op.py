"""Products with matrices in 16 bits: the fp32 matrix's, for any number of rows, also where a graph was compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lancebill.backends.cpu import narrow_linear as narrow
from lancebill.layer.narrow_op import narrow_linear, narrow_rows

pytestmark = pytest.mark.skipif(not narrow.is_supported(), reason="the CPU kernels are not built")
N, K = 72, 40


def matrix(dtype: torch.dtype) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def biases() -> dict[str, Tensor | None]:
    """Biases of [N]; a kernel that read their memory as dense fp32 would read other numbers, or beyond the end."""
    wide = torch.randn(N, 3, generator=torch.Generator().manual_seed(3))
    dense = wide[:, 1].contiguous()
    others = {"bf16": dense.bfloat16(), "strided": wide[:, 1], "expanded": wide[0, :1].expand(N)}
    return {"no bias": None, "fp32": dense, **others}


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, K, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 3), (narrow.MOST_ROWS + 1,)])
@pytest.mark.parametrize("kind", ["no bias", "fp32", "bf16", "strided", "expanded"])
def test_the_product_is_that_of_the_fp32_matrix(
    dtype: torch.dtype, shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "CONVERTED", 5 * K)  # with many rows: five rows of the matrix at a time
    weight, x, bias = matrix(dtype), rows(*shape), biases()[kind]
    made = narrow_linear(x, weight, bias)
    assert made.dtype == torch.float32 and made.shape == (*shape, N)
    wide = None if bias is None else bias.float()
    torch.testing.assert_close(made, torch.nn.functional.linear(x, weight.float(), wide))


def test_rows_may_have_any_strides_and_other_dtypes() -> None:
    weight, wide = matrix(torch.bfloat16), rows(6)
    for x in (wide[::2], rows(K).t()[:, :6].t(), torch.cat((wide, wide), 1)[:, :K]):
        torch.testing.assert_close(narrow_linear(x, weight, None), x @ weight.float().t())
    x = wide.bfloat16()
    assert torch.equal(narrow_linear(x, weight, None), torch.nn.functional.linear(x, weight))


def test_a_row_does_not_depend_on_the_others() -> None:
    weight, x = matrix(torch.bfloat16), rows(43)
    whole = narrow_linear(x, weight, None)
    for first, last in ((0, 1), (3, 5), (8, 15), (9, 42)):
        assert torch.equal(whole[first:last], narrow_linear(x[first:last], weight, None))


def test_a_compiled_graph_follows_the_matrix_from_16_to_32_bits() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(matrix(torch.bfloat16), requires_grad=False)

        def forward(self, ids: Tensor) -> Tensor:
            return narrow_linear(narrow_rows(ids, self.weight), self.weight, None)

    model, ids = Model(), torch.tensor([3, 70, 3])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        wide = model.weight.float()
        torch.testing.assert_close(compiled(ids), wide[ids] @ wide.t())
        model.weight.data = model.weight.float() * 1.001
