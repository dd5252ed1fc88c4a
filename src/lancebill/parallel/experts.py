"""`ExpertParallel`: a `RoutedExperts` whose experts are spread over processes."""

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
from lancebill.parallel.moves import carry_out, plan_moves
from lancebill.parallel.replicas import Assignment, Tables, count_load

ALL_TO_ALL, GATHER = "all_to_all", "gather"


class ExpertParallel(nn.Module):
    """One layer of routed experts over a mesh of ranks.

    Each rank of an `ep` group brings its own tokens, as many as it has; ranks of a `tp` group bring
    the same ones. `form` is how tokens and experts meet: "all_to_all" sends tokens to their experts,
    "gather" shows every token to every rank in fixed shapes (`max_tokens` a rank) for graphs.
    Results travel and are summed in `wire`; fp32 makes the all-to-all form bitwise equal to one rank
    that has everything. All ranks must call the same methods in the same order.
    """

    load: Tensor
    _assignment: Assignment | None
    _tables: Tables | None

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
        """`placement` is what `layer` was loaded with, by default `mesh.placement()`.

        A process outside the mesh may make one too, of an empty layer, to join by `resize`.
        """
        super().__init__()
        if form not in (ALL_TO_ALL, GATHER) or (form == GATHER and max_tokens < 1):
            raise SpecError(
                "no such form of expert parallelism",
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
        self._adopt(assignment)

    @property
    def assignment(self) -> Assignment:
        """Where every copy of every expert lives now."""
        if self._assignment is None:
            raise LaunchError("this process is outside the mesh", hint="call resize() to join")
        return self._assignment

    def forward(self, x: Tensor, *, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [M, H] through the experts each row is routed to, wherever they are: [M, H].

        Ids are logical; those below 0 are padding. M may be 0 and may differ between `ep` ranks.
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
        """Routing inside, on the token's own rank. Zero experts and shared experts are added once,
        after all sums: the layer's `shared_experts` are whole on every rank."""
        routed = self.layer.route(x, router_logits, input_ids)
        out = self.forward(x, topk_ids=routed.ids, topk_weights=routed.weights)
        return self.layer.complete(x, out, routed)

    def logical_load(self) -> list[int]:
        """Slots routed to each logical expert by all ranks since experts last moved."""
        counted = self.mesh.ep.all_reduce(self.load.clone()).tolist()
        return [sum(counted[p] for p in ids) for ids in self.assignment.replicas]

    def rebalance(self, *, nodes: int = 1, groups: int = 1) -> Assignment:
        """Spread the measured load evenly: `balance` says where copies go, then weights are moved."""
        held = balance.rebalance(self.logical_load(), self.assignment.held, nodes=nodes, groups=groups)
        return self.arrange(self.assignment.arranged(held))

    def arrange(self, wanted: Assignment) -> Assignment:
        """Move experts until every place holds what `wanted` says; the same on all ranks."""
        before = self.assignment
        if (wanted.slots, wanted.experts) != (before.slots, before.experts):
            raise ShardError("this arrangement has other places", hint="use resize() to change their number")
        rows = self._rows()
        carry_out(plan_moves(before.held, wanted.held), rows, rows, self.mesh.ep)
        self.layer.hold(wanted.held[self.mesh.ep.rank])
        return self._adopt(wanted)

    def resize(self, mesh: Mesh, *, redundant: int | None = None) -> Assignment:
        """Spread the experts over another number of ranks; called by all ranks of both meshes.

        The ranks that stay come first in the larger mesh. One that leaves holds nothing afterwards;
        one that joins brings an empty layer of the same layout.
        """
        larger = max(self.mesh, mesh, key=lambda m: m.ep.size)
        self._check_resize(mesh, larger)
        self._check_alike(larger.everyone)
        before = self._tell_assignment(larger.ep)
        extra = before.redundant if redundant is None else redundant
        after = Assignment.of(Placement(ep_size=mesh.ep.size, strategy=self.strategy, redundant=extra), before.experts)
        held = () if mesh.outside else after.held[mesh.ep.rank]
        rows = self._rows()
        room = {
            matrix: {name: t.new_empty(len(held), *t.shape[1:]) for name, t in tensors.items()}
            for matrix, tensors in self.layer.packed.items()
        }
        self.layer.rehome(room, held, after.expert_map(mesh.ep.rank))
        carry_out(plan_moves(before.held, after.held), rows, self._rows(), larger.ep)
        self.mesh = mesh
        return self._adopt(after)

    def get_extra_state(self) -> Tensor:
        """The logical expert of each place: rows in a state_dict mean nothing without it."""
        return torch.tensor(self.assignment.logical, dtype=torch.int32)

    def set_extra_state(self, state: Tensor) -> None:
        logical = tuple(state.reshape(-1).tolist())
        if len(logical) != self.assignment.physical or set(logical) != set(range(self.assignment.experts)):
            raise ShardError(
                "saved under another placement",
                expected=f"{self.assignment.physical} places of {self.assignment.experts} experts",
                got=f"{len(logical)} places of {len(set(logical))}",
            )
        self._adopt(replace(self.assignment, logical=logical))
        self.layer.hold(self.assignment.held[self.mesh.ep.rank])

    def _rows(self) -> list[Tensor]:
        return self.layer.expert_weights() + self.layer.expert_inputs()

    def _device(self) -> torch.device:
        return next(self.layer.parameters()).device

    def _adopt(self, assignment: Assignment) -> Assignment:
        """Look experts up under `assignment` from now on, and start counting anew."""
        self._assignment = None if self.mesh.outside else assignment
        self._tables = None if self.mesh.outside else Tables(assignment, self._device())
        self.load = torch.zeros(assignment.physical + 1, dtype=torch.int64, device=self._device())
        return assignment

    def _lookup(self) -> Tables:
        if self._tables is None:
            raise LaunchError("this process is outside the mesh", hint="call resize() to join")
        return self._tables

    def _tell_assignment(self, group: RankGroup) -> Assignment:
        """Rank 0 tells those that join what is where; others hear what they know."""
        known = self._assignment
        text = "" if known is None else json.dumps([self.strategy, known.experts, known.slots, known.logical])
        strategy, experts, slots, logical = json.loads(group.gather_text(text, self._device())[0])
        self.strategy = strategy
        return Assignment(experts, tuple(map(tuple, slots)), tuple(logical))

    def _check_placement(self, placement: Placement, assignment: Assignment) -> None:
        mesh, layer = self.mesh, self.layer
        ours = (mesh.tp.rank, mesh.tp.size, mesh.ep.rank, mesh.ep.size)
        theirs = (placement.tp_rank, placement.tp_size, placement.ep_rank, placement.ep_size)
        if ours != theirs:
            raise ShardError(
                "the placement is another rank's (tp rank and size, ep rank and size)", expected=ours, got=theirs
            )
        expected = list(assignment.expert_map(mesh.ep.rank))
        held = range(layer.problem.global_experts) if layer.expert_map is None else layer.expert_map.tolist()
        if list(held) != expected:
            raise ShardError("the layer was loaded under another placement", expected=expected, got=list(held))

    def _check_form(self) -> None:
        """The backend chosen for indexed work must take the work this form gives it."""
        choice = self.layer.choice
        problem = replace(choice.problem, dispatch=CONTIGUOUS)
        if self.form == GATHER or self.mesh.ep.size == 1 or problem.weight_on_input:
            return
        reasons = list(choice.backend.check(problem, choice.device))
        if reasons:
            raise UnsupportedProblem(
                f"{choice.backend.name} cannot compute rows grouped by expert: {'; '.join(map(str, reasons))}",
                hint=f"use form='{GATHER}' or another backend",
            )

    def _check_alike(self, group: RankGroup) -> None:
        """All ranks must hold experts in one layout and mean the same computation by them."""
        facts = self.layer.problem.describe()
        facts |= {"experts": "", "global_experts": "", "layout": self.layer.layout_signature()}
        facts |= {"form": self.form, "max_tokens": self.max_tokens, "wire": self.wire}
        group.agree(facts, self._device(), "this rank would compute another way than the others")

    def _check_resize(self, mesh: Mesh, larger: Mesh) -> None:
        smaller = mesh if larger is self.mesh else self.mesh
        if mesh.tp.size != self.mesh.tp.size:
            raise ShardError("tensor parallelism cannot change", expected=self.mesh.tp.size, got=mesh.tp.size)
        expected = larger.ep.ranks[: smaller.ep.size]
        if not smaller.outside and smaller.ep.ranks != expected:
            raise ShardError("the ranks that stay come first", expected=expected, got=smaller.ep.ranks)
