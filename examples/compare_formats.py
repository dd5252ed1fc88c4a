"""What each weight format costs in memory and accuracy, for one layer of a checkpoint.

    python examples/compare_formats.py PATH

Requantises the layer while loading and compares its output with that of the stored weights.
"""

import sys

import torch

from lancebill import RoutedExperts
from lancebill.errors import LancebillError

if len(sys.argv) < 2:
    sys.exit(__doc__)
path = sys.argv[1]
stored = RoutedExperts.from_checkpoint(path, layer=0)
problem = stored.problem
x = torch.randn(64, problem.hidden, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
logits = torch.randn(64, problem.global_experts, generator=torch.Generator().manual_seed(1))
expected = stored.forward_routed(x, logits).float()
for spec in ("fp8-channel", "int8", "mxfp4", "nvfp4", "int4-g32", "nf4"):
    try:
        layer = RoutedExperts.from_checkpoint(path, layer=0, weights=spec)
    except LancebillError as error:  # a matrix whose rows are not whole groups, for example
        print(f"{spec:12} {error}")
        continue
    error = (layer.forward_routed(x, logits).float() - expected).norm() / expected.norm()
    size = sum(tensor.nbytes for tensor in layer.parameters())
    print(f"{spec:12} {size / 2**20:8.2f} MiB   output differs by {error:.2%}   on {layer.choice.backend.name}")
