"""`ExpertParallel`: a `RoutedExperts` layer whose experts are distributed over processes."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import Tensor, nn

from lancebill.errors import LaunchError, ShardError, SpecError, UnsupportedProblem
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.moe.placement import LINEAR, Placement
from lancebill.moe.problem import CONTIGUOUS
from lancebill.parallel import all_to_all, balance, gather
from lancebill.parallel.groups import Mesh, RankGroup
from lancebill.parallel.moves import plan_moves, run_moves
from lancebill.parallel.replicas import Assignment, ReplicaTables, count_load

ALL_TO_ALL, GATHER = "all_to_all", "gather"


class ExpertParallel(nn.Module):
    """One layer of routed experts on a mesh of ranks.

    Each rank of an `ep` group passes its own tokens, any number of them; ranks of a `tp` group pass the same tokens.
    `form` "all_to_all" sends tokens to their experts; "gather" sends every token to every rank in fixed shapes
    (`max_tokens` per rank), for CUDA graphs. Results are sent and summed in the dtype `wire`; with fp32 the all-to-all
    form is bitwise equal to a single rank with all experts. All ranks must call the same methods in the same order.
    """

    load: Tensor
    _assignment: Assignment | None
    _tables: ReplicaTables | None

    def __init__(
        self,
        layer: RoutedExperts,
        mesh: Mesh,
        placement: Placement | None = None,
        *,
        form: str = ALL_TO_ALL,
        max_tokens: int = 0,
        wire: torch.dtype = torch.float32,
    ) -> None:
        """`placement` is the one `layer` was loaded with, by default `mesh.placement()`.

        A process outside the mesh may create one with an empty layer and join later with `resize`.
        """
        super().__init__()
        if form not in (ALL_TO_ALL, GATHER) or (form == GATHER and max_tokens < 1):
            raise SpecError(
                "unknown form of expert parallelism",
                expected=f"{ALL_TO_ALL}, or {GATHER} with max_tokens >= 1",
                got=f"{form} with max_tokens {max_tokens}",
            )
        self.layer, self.mesh, self.form, self.max_tokens, self.wire = layer, mesh, form, max_tokens, wire
        self.register_buffer("load", None, persistent=False)
        self.strategy, self._assignment, self._tables = LINEAR, None, None
        if mesh.outside:
            return
        placement = mesh.placement() if placement is None else placement
        assignment = Assignment.of(placement, layer.problem.global_experts - placement.redundant)
        self._check_placement(placement, assignment)
        self._check_form()
        self._check_alike(mesh.everyone)
        self.strategy = placement.strategy
        self._use_assignment(assignment)

    @property
    def assignment(self) -> Assignment:
        """Rank and slot of every copy of every expert."""
        if self._assignment is None:
            raise LaunchError("this process is outside the mesh", hint="call resize() to join")
        return self._assignment

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run x [M, H] through the experts that each row is routed to, on whichever rank they are: [M, H].

        Ids are logical; negative ids are padding. M may be 0 and may differ between `ep` ranks.
        """
        layer, mesh = self.layer, self.mesh
        layer.check(x, topk_ids, topk_weights)
        tables = self._lookup()
        indexed = Indexed(tables.choose(topk_ids), topk_weights.float())
        count_load(self.load, indexed.ids)
        out = torch.empty_like(x, dtype=x.dtype if mesh.tp.size == 1 else self.wire)
        if mesh.ep.size == 1:
            layer.compute(x, indexed.ids, indexed.weights, out)
        elif self.form == ALL_TO_ALL:
            all_to_all.forward(layer, mesh.ep, tables, x, indexed, out, self.wire)
        else:
            out = gather.forward(layer, mesh.ep, self.max_tokens, x, indexed, self.wire)
        if mesh.tp.size > 1:
            out = mesh.tp.all_reduce(out.contiguous())
        return out.to(x.dtype)

    def forward_routed(self, x: Tensor, router_logits: Tensor, *, input_ids: Tensor | None = None) -> Tensor:
        """Route on the token's own rank, then `forward`.

        Zero experts and shared experts are added once, after the sums over ranks: every rank has the whole
        `shared_experts`.
        """
        routed = self.layer.route(x, router_logits, input_ids)
        out = self.forward(x, topk_ids=routed.ids, topk_weights=routed.weights)
        return self.layer.complete(x, out, routed)

    def logical_load(self) -> list[int]:
        """Number of slots that all ranks routed to each logical expert since experts last moved."""
        by_physical = self.mesh.ep.all_reduce(self.load.clone()).tolist()
        return [sum(by_physical[p] for p in ids) for ids in self.assignment.replicas]

    def rebalance(self, *, nodes: int = 1, groups: int = 1) -> Assignment:
        """Balance the measured load: choose where copies of experts go, then move the weights."""
        by_rank = balance.rebalance(self.logical_load(), self.assignment.experts_by_rank, nodes=nodes, groups=groups)
        return self.arrange(self.assignment.arranged(by_rank))

    def arrange(self, after: Assignment) -> Assignment:
        """Move experts to the slots given by `after`, which must be the same on all ranks."""
        before = self.assignment
        if (after.slots, after.experts) != (before.slots, before.experts):
            raise ShardError("this arrangement has different slots", hint="use resize() to change their number")
        rows = self._rows()
        run_moves(plan_moves(before.experts_by_rank, after.experts_by_rank), rows, rows, self.mesh.ep)
        self.layer.hold(after.experts_by_rank[self.mesh.ep.rank])
        return self._use_assignment(after)

    def resize(self, mesh: Mesh, *, redundant: int | None = None) -> Assignment:
        """Distribute the experts over another number of ranks; all ranks of both meshes call this.

        The ranks of the smaller mesh come first in the larger one. A rank that leaves holds no experts afterwards;
        a rank that joins passes an empty layer of the same layout.
        """
        larger = max(self.mesh, mesh, key=lambda m: m.ep.size)
        self._check_resize(mesh, larger)
        self._check_alike(larger.everyone)
        before = self._share_assignment(larger.ep)
        extra = before.redundant if redundant is None else redundant
        after = Assignment.of(Placement(ep_size=mesh.ep.size, strategy=self.strategy, redundant=extra), before.experts)
        local = () if mesh.outside else after.experts_by_rank[mesh.ep.rank]
        rows = self._rows()
        buffers = {
            matrix: {name: t.new_empty(len(local), *t.shape[1:]) for name, t in tensors.items()}
            for matrix, tensors in self.layer.packed.items()
        }
        self.layer.rehome(buffers, local, after.expert_map(mesh.ep.rank))
        run_moves(plan_moves(before.experts_by_rank, after.experts_by_rank), rows, self._rows(), larger.ep)
        self.mesh = mesh
        return self._use_assignment(after)

    def get_extra_state(self) -> Tensor:
        """The logical expert of each physical one: without it the rows of a state_dict cannot be interpreted."""
        return torch.tensor(self.assignment.logical, dtype=torch.int32, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        logical = tuple(state.reshape(-1).tolist())
        if len(logical) != self.assignment.physical or set(logical) != set(range(self.assignment.experts)):
            raise ShardError(
                "the state was saved under another placement",
                expected=f"{self.assignment.physical} slots with {self.assignment.experts} experts",
                got=f"{len(logical)} slots with {len(set(logical))} experts",
            )
        self._use_assignment(replace(self.assignment, logical=logical))
        self.layer.hold(self.assignment.experts_by_rank[self.mesh.ep.rank])

    def _rows(self) -> list[Tensor]:
        return self.layer.expert_weights() + self.layer.expert_inputs()

    def _device(self) -> torch.device:
        return next(self.layer.parameters()).device

    def _use_assignment(self, assignment: Assignment) -> Assignment:
        """Use `assignment` from now on, and reset the load counters."""
        self._assignment = None if self.mesh.outside else assignment
        self._tables = None if self.mesh.outside else ReplicaTables(assignment, self._device())
        self.load = torch.zeros(assignment.physical + 1, dtype=torch.int64, device=self._device())
        return assignment

    def _lookup(self) -> ReplicaTables:
        if self._tables is None:
            raise LaunchError("this process is outside the mesh", hint="call resize() to join")
        return self._tables

    def _share_assignment(self, group: RankGroup) -> Assignment:
        """Rank 0's assignment, on all ranks: ranks that join have none yet."""
        mine = self._assignment
        text = "" if mine is None else json.dumps([self.strategy, mine.experts, mine.slots, mine.logical])
        strategy, experts, slots, logical = json.loads(group.gather_text(text, self._device())[0])
        self.strategy = strategy
        return Assignment(experts, tuple(map(tuple, slots)), tuple(logical))

    def _check_placement(self, placement: Placement, assignment: Assignment) -> None:
        mesh, layer = self.mesh, self.layer
        ours = (mesh.tp.rank, mesh.tp.size, mesh.ep.rank, mesh.ep.size)
        theirs = (placement.tp_rank, placement.tp_size, placement.ep_rank, placement.ep_size)
        if ours != theirs:
            raise ShardError(
                "the placement is not this rank's (tp rank, tp size, ep rank, ep size)", expected=ours, got=theirs
            )
        expected = list(assignment.expert_map(mesh.ep.rank))
        actual = range(layer.problem.global_experts) if layer.expert_map is None else layer.expert_map.tolist()
        if list(actual) != expected:
            raise ShardError("the layer was loaded under another placement", expected=expected, got=list(actual))

    def _check_form(self) -> None:
        """The backend was chosen for indexed dispatch; the all-to-all form also needs contiguous dispatch."""
        choice = self.layer.choice
        problem = replace(choice.problem, dispatch=CONTIGUOUS)
        if self.form == GATHER or self.mesh.ep.size == 1 or problem.weight_on_input:
            return
        reasons = list(choice.backend.reasons(problem, choice.device))
        if reasons:
            raise UnsupportedProblem(
                f"{choice.backend.name} cannot compute rows that are grouped by expert: {'; '.join(map(str, reasons))}",
                hint=f"use form='{GATHER}' or another backend",
            )

    def _check_alike(self, group: RankGroup) -> None:
        """All ranks must use the same layout and compute the same problem."""
        facts = self.layer.problem.describe()
        facts |= {"experts": "", "global_experts": "", "layout": self.layer.layout_signature()}
        facts |= {"form": self.form, "max_tokens": self.max_tokens, "wire": self.wire}
        group.require_agreement(facts, self._device(), "this rank's layer differs from those of the other ranks")

    def _check_resize(self, mesh: Mesh, larger: Mesh) -> None:
        smaller = mesh if larger is self.mesh else self.mesh
        if mesh.tp.size != self.mesh.tp.size:
            raise ShardError(
                "resize() cannot change the tensor-parallel size", expected=self.mesh.tp.size, got=mesh.tp.size
            )
        expected = larger.ep.ranks[: smaller.ep.size]
        if not smaller.outside and smaller.ep.ranks != expected:
            raise ShardError(
                "the ranks of the smaller mesh must come first in the larger one",
                expected=expected,
                got=smaller.ep.ranks,
            )
