"""Run by two processes, one for each rank (RANK, WORLD_SIZE, MASTER_ADDR): vLLM's engine in each, cell after cell.

python two_ranks.py JOB, where JOB is a JSON file: {"model": folder, "other": folder of the same model with other
weights, "out": folder for results, "cells": {name: port}}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engine
import torch

EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
PARALLEL: dict[str, dict[str, Any]] = {
    "ep2": EXPERTS,
    "dp2": {"data_parallel_size": 2},
    "dp2-ep2": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
Result = dict[str, Any]


def rank() -> int:
    return int(os.environ["RANK"])


@contextmanager
def started(model: str, **options: Any) -> Iterator[Any]:
    with engine.engine(
        Path(model), {"mode": "require"}, distributed_executor_backend="external_launcher", **options
    ) as llm:
        yield llm


def answers(llm: Any, prompts: Any = engine.PROMPTS) -> list[Any]:
    made = engine.ask(llm, prompts)
    return [made.tokens, made.logprobs]


def parallel_answers(name: str, job: Any) -> Result:
    """Data-parallel ranks have prompts of their own, and not equally many."""
    mine = engine.PROMPTS[rank() :] if name.startswith("dp") else engine.PROMPTS
    with started(job["model"], **PARALLEL[name]) as llm:
        return {"answers": answers(llm, mine)}


def dispatched(name: str, job: Any) -> Result:
    """Data parallelism with an all-to-all backend that dispatches rows itself.

    Then again with the kernels that vLLM makes before the number of ranks changes (elastic expert parallelism).
    """
    import dispatch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.eep_reconfigure import make_eep_staged_quant_method

    way = name.removeprefix("dispatch-")
    options = {**PARALLEL["dp2-ep2"], "all2all_backend": dispatch.BACKENDS[way]}
    with dispatch.gloo_dispatch(way) as made, started(job["model"], **options) as llm:
        first = answers(llm, engine.PROMPTS[rank() :])
        with set_current_vllm_config(runner_of(llm).vllm_config):
            for runner in runners(llm):
                staged = make_eep_staged_quant_method(runner, runner.moe_config, all2all_manager=None)
                runner._replace_quant_method(staged)
        again = answers(llm, engine.PROMPTS[rank() :])
        return {"answers": [first, again], "calls": [each.calls for each in made]}


# vLLM allows load balancing on GPUs only. All of it but one kernel runs on CPUs too, if four things are done for it:
# the option is set after it was checked, the runner is given the state that its CPU class does not make, ids are mapped
# by the function below instead of a Triton kernel, and the GPU event that measures a rearrangement measures nothing.


def map_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """What vLLM's kernel computes: the slot of one copy of each expert, chosen by a hash of the token's index."""
    ids, token = topk_ids.long(), torch.arange(len(topk_ids))[:, None]
    copy = ((token * 2654435769) & 0xFFFFFFFF) % logical_replica_count[ids]
    physical = logical_to_physical_map[ids, copy]
    flat = physical.flatten()
    expert_load_view.scatter_add_(0, flat, torch.ones_like(flat, dtype=expert_load_view.dtype))
    return physical.to(topk_ids.dtype)


class NoEvent:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextmanager
def balancing(model: str, redundant: int) -> Iterator[Any]:
    """An engine on two ranks with load balancing."""
    from vllm.config.parallel import EPLBConfig
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.router import base_router

    checked, event = EngineArgs.create_engine_config, torch.Event

    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = checked(self, *args, **kwargs)
        config.parallel_config.enable_eplb = True
        config.parallel_config.eplb_config = EPLBConfig(
            num_redundant_experts=redundant,
            use_async=False,
            communicator="torch_nccl",
            window_size=1000,
            step_interval=1000,
        )
        return config

    EngineArgs.create_engine_config, base_router.eplb_map_to_physical_and_record = create, map_and_record
    try:
        with started(model, **EXPERTS) as llm:
            torch.Event = NoEvent
            runner = runner_of(llm)
            runner.eplb_state, runner._moe_model = EplbState(runner.parallel_config, runner.device), runner.model
            runner.eplb_state.add_model(runner.model, runner.model_config)
            yield llm
    finally:
        EngineArgs.create_engine_config, torch.Event = checked, event


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def runners(llm: Any) -> list[Any]:
    """vLLM's layers of routed experts."""
    return [module for module in runner_of(llm).model.modules() if hasattr(module, "routed_experts")]


def expected_rows(model: str, layer: Any, index: int) -> list[torch.Tensor]:
    """The packed bytes of all experts of a layer, as one rank with all of them has them."""
    from lancebill import RoutedExperts

    whole = RoutedExperts.from_checkpoint(model, index, dtype=torch.float32, backend=layer.choice.backend.name)
    return [rows.view(torch.uint8) for rows in (*whole.expert_weights(), *whole.expert_inputs())]


def misplaced(llm: Any, model: str) -> list[str]:
    """Slots that do not hold the bytes of the expert that vLLM's map says."""
    runner, wrong = runner_of(llm), []
    (state,) = runner.eplb_state.model_states.values()
    takeover = engine.takeover_of(llm)
    for row, (index, layer) in enumerate(sorted(takeover.layers.items())):
        places = layer.expert_map.tolist() if layer.expert_map is not None else range(layer.problem.experts)
        want, got = expected_rows(model, layer, index), takeover.movable(index)
        for physical, slot in enumerate(places):
            expert = int(state.physical_to_logical_map[row, physical])
            if slot >= 0 and not all(torch.equal(a[slot], b[expert]) for a, b in zip(got, want, strict=True)):
                wrong.append(f"layer {index}, slot {slot}: not expert {expert}")
    return wrong


def maps(llm: Any) -> list[list[int]]:
    (state,) = runner_of(llm).eplb_state.model_states.values()
    held: list[list[int]] = state.physical_to_logical_map.tolist()
    return held


def balanced(name: str, job: Any) -> Result:
    """Ask, let vLLM rearrange the experts, ask again; then refit to other weights and back."""
    with balancing(job["model"], redundant=2) as llm:
        result: Result = {"maps": [maps(llm)], "answers": [answers(llm)], "wrong": misplaced(llm, job["model"])}

        def note(model: str) -> None:
            result["maps"].append(maps(llm))
            result["wrong"] += misplaced(llm, model)
            result["answers"].append(answers(llm))

        runner_of(llm).eplb_state.rearrange()
        note(job["model"])
        for model in (job["other"], job["model"]):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
            note(model)
    return result


def elastic(name: str, job: Any) -> Result:
    """Rank 1 joins rank 0, which has all experts, and leaves again: what elastic expert parallelism does to layers.

    vLLM's own driver of it needs NCCL. These are its calls: move, commit the maps, tell the model.
    """
    with balancing(job["model"], redundant=8) as llm:
        result: Result = {"answers": [answers(llm)], "wrong": []}
        takeover = engine.takeover_of(llm)
        if rank() == 1:  # a rank that joins starts with other weights
            for index in takeover.layers:
                for rows in takeover.movable(index):
                    rows.zero_()
        old = torch.arange(8).repeat(2, 1)
        both = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0, 0, 2, 4, 6, 1, 3, 5, 7]).repeat(2, 1)
        move(llm, old, both, {0: 0})
        for ranks in (3, 2):  # as if a third one came and went: maps grow and shrink
            resize(llm, ranks)
            result["wrong"] += [
                len(layer.expert_map) for layer in takeover.layers.values() if len(layer.expert_map) != 8 * ranks
            ]
        result["wrong"] += misplaced(llm, job["model"])
        result["answers"].append(answers(llm))
        move(llm, both, old, {0: 0, 1: -1})
        if rank() == 0:
            resize(llm, ranks=1)
            result["wrong"] += misplaced(llm, job["model"])
            result["distance"] = distance_to_whole(llm, job["model"])
    return result


def move(llm: Any, old: torch.Tensor, new: torch.Tensor, rank_mapping: dict[int, int]) -> None:
    """vLLM's rearrangement for another number of ranks; `old` and `new` are the experts by layer and physical id."""
    from vllm.distributed import get_ep_group
    from vllm.distributed.eplb import eplb_state
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    (state,) = runner_of(llm).eplb_state.model_states.values()
    rearrange_expert_weights_inplace(
        old,
        new,
        state.model.expert_weights,
        state.expert_buffer,
        get_ep_group().device_group,
        state.communicator,
        rank_mapping=rank_mapping,
    )
    eplb_state._commit_eplb_maps(state, new)


def resize(llm: Any, ranks: int) -> None:
    """What vLLM does to a model when the number of ranks changes."""
    for runner in runners(llm):
        moe = runner.moe_config
        parallel = replace(moe.moe_parallel_config, ep_size=ranks)
        runner._set_moe_config(replace(moe, num_experts=moe.num_local_experts * ranks, moe_parallel_config=parallel))
    runner_of(llm).model.update_physical_experts_metadata(8 * ranks, 8)


def distance_to_whole(llm: Any, model: str) -> float:
    """The largest difference between this rank's layers, alone, and layers that never were on two ranks."""
    from lancebill import RoutedExperts

    generator, worst = torch.Generator().manual_seed(0), 0.0
    x = torch.randn(5, 128, generator=generator)
    ids, weights = torch.rand(5, 8, generator=generator).topk(2).indices, torch.full((5, 2), 0.5)
    for index, layer in engine.takeover_of(llm).layers.items():
        whole = RoutedExperts.from_checkpoint(model, index, dtype=torch.float32)
        made = [each(x, topk_ids=ids, topk_weights=weights) for each in (layer, whole)]
        worst = max(worst, float((made[0] - made[1]).abs().max()))
    return worst


CELLS: dict[str, Callable[[str, Any], Result]] = {
    **dict.fromkeys(PARALLEL, parallel_answers),
    **dict.fromkeys(("dispatch-tokens", "dispatch-grouped", "dispatch-batches"), dispatched),
    "balanced": balanced,
    "elastic": elastic,
}


def main() -> None:
    engine.set_environment()
    job = json.loads(Path(sys.argv[1]).read_text())
    for name, port in job["cells"].items():
        os.environ["MASTER_PORT"] = str(port)
        result = CELLS[name](name, job)
        (Path(job["out"]) / f"{name}-{rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
