"""vLLM's load balancing (EPLB) moves experts between slots; here our layers learn which expert a slot holds now.

Computing needs nothing: the router gives ids of slots, and vLLM moves the bytes in place. Tensors that are loaded
later go to the slots that hold their experts. vLLM has no call after a move, so its maps are read before each load.
"""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from lancebill.integrations.vllm.experts import Offered
from lancebill.integrations.vllm.placement import experts_of, slots_of
from lancebill.integrations.vllm.takeover import Takeover


def follow_moves(model: nn.Module, takeover: Takeover) -> None:
    """Bring the layers of a takeover up to date with the maps in vLLM's model."""
    for runner in model.modules():
        if not isinstance(runner, MoERunner) or not isinstance(runner.routed_experts, Offered):
            continue
        method, state = runner.routed_experts.taken, runner.eplb_state
        if method is None or state is None or state.logical_to_physical_map is None:
            continue
        layer = takeover.layers.get(method.index)
        if layer is not None and layer.expert_map is not None:
            most = int(state.logical_replica_count.max())
            copies = state.logical_to_physical_map[:, :most].tolist()
            takeover.hold(method.index, experts_of(copies, slots_of(layer.expert_map.tolist())))
