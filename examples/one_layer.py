"""The experts of one layer of a checkpoint, as an engine would call them.

    python examples/one_layer.py PATH [LAYER]

Reads only that layer's experts, whatever format they are stored in, and prints which backend computes them and why.
"""

import sys

import torch

from lancebill import RoutedExperts

if len(sys.argv) < 2:
    sys.exit(__doc__)
path, index = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
layer = RoutedExperts.from_checkpoint(path, layer=index)
print(layer.report)

problem = layer.problem
x = torch.randn(5, problem.hidden, dtype=torch.bfloat16)
logits = torch.randn(5, problem.global_experts)  # an engine's router computes these
print(layer.forward_routed(x, logits).shape)
