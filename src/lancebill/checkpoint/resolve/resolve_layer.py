"""Resolve one layer of a checkpoint: sizes, schemes, where each part is stored, and what is wrong."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from lancebill.checkpoint.resolve.expert_sizes import MAX_EXPERTS
from lancebill.checkpoint.resolve.naming import DOWN, GATE, GATE_UP, UP, NameForm, Naming
from lancebill.checkpoint.resolve.orientation import orientations
from lancebill.checkpoint.resolve.stored_layer import Projection, StoredLayer, StoredPart
from lancebill.errors import (
    BadValue,
    CheckpointError,
    DuplicateTensor,
    MissingTensor,
    MixedSpecs,
    UnexpectedTensor,
    WrongDtype,
    WrongShape,
)
from lancebill.formats import axes as ax
from lancebill.formats.base import BIAS, FLOATS, Format, Module, Part, Scheme, dense
from lancebill.formats.stored import Config, Stored


@dataclass
class ModuleTensors:
    """The tensors of one module: {suffix: tensor name}."""

    prefix: str
    names: dict[str, str] = field(default_factory=dict)


class LayerBuilder:
    """Resolves one layer and collects its problems."""

    def __init__(
        self,
        config: Config,
        fmt: Format,
        naming: Naming,
        form: NameForm,
        index: int,
        modules: Mapping[tuple[int | None, str], ModuleTensors],
        tensors: Mapping[str, Stored],
        *,
        rivals: Sequence[NameForm] = (),
    ) -> None:
        """`rivals`: other forms that fit the stored names as well."""
        self.config, self.format, self.naming, self.form, self.index = config, fmt, naming, form, index
        self.where, self.rivals = naming.where(index), rivals
        self.modules, self.tensors = modules, tensors
        self.sizes = naming.sizes(config.model)
        self.prefix = next(iter(modules.values())).prefix
        self.experts = self.sizes.experts or self._stored_experts()
        self.problems: list[CheckpointError] = []

    def build(self, only: Container[int] | None = None) -> StoredLayer | None:
        """The layer, or None if an expert (of those in `only`) cannot be resolved."""
        schemes = self._schemes()
        geometry = self._geometry(schemes)
        if geometry is None:
            return None
        experts, hidden, inter = geometry
        projections: dict[tuple[int, str], Projection] = {}
        chosen = self._chosen(experts, only)
        for expert in chosen:
            for stored in self.form.names:
                for projection in self._resolve(schemes, expert, stored, hidden, inter):
                    projections[expert, projection.name] = projection
            if self.form.stacked and not self._complete(projections, [expert]):
                break  # the other experts are in the same tensors
        self._check_strays(experts)
        self._check_agreement(projections, chosen)
        if not self._complete(projections, chosen):
            return None
        return StoredLayer(self.index, self.prefix, self.form, experts, hidden, inter, projections, self.naming.mixture)

    def _chosen(self, experts: int, only: Container[int] | None) -> list[int]:
        """The experts to resolve: those that are stored, and those that are missing.

        No more missing experts are listed than are stored: how many the config claims to have must not decide how
        long this takes.
        """
        if self.form.stacked:
            return [e for e in range(experts) if only is None or e in only]
        stored = {e for e, _ in self.modules if e is not None and e < experts}
        wanted = sorted(stored if only is None else (e for e in stored if e in only))
        missing = (e for e in range(experts) if e not in stored and (only is None or e in only))
        listed = list(islice(missing, len(self.modules)))
        more = next(missing, None)
        if more is not None:
            self.problems.append(
                MissingTensor(
                    f"expert {more} and maybe others have no tensor",
                    where=self.where,
                    expected=f"{experts} experts",
                    got=f"tensors of {len(stored)}",
                )
            )
        return sorted(wanted + listed)

    def _complete(self, projections: Mapping[tuple[int, str], Projection], experts: Sequence[int]) -> bool:
        names = (GATE, UP, DOWN) if self.form.gated else (GATE, DOWN)
        return all((expert, name) in projections for expert in experts for name in names)

    def _module_name(self, expert: int, stored: str) -> str:
        return self.form.module(self.prefix, self.index, expert, stored)

    def _schemes(self) -> dict[tuple[int | None, str], Scheme]:
        """A scheme for every module that has tensors; equal schemes are shared."""
        schemes: dict[tuple[int | None, str], Scheme] = {}
        shared: dict[Scheme, Scheme] = {}
        for (expert, stored), module in self.modules.items():
            name = self._module_name(expert or 0, stored)
            headers = {suffix: self.tensors[tensor] for suffix, tensor in module.names.items()}
            try:
                scheme = self._plain_stack(name, headers) or self.format.scheme(self.config, Module(name, headers))
                self._check_plain(scheme, name, headers)
            except CheckpointError as error:
                self.problems.append(error)
                continue
            schemes[expert, stored] = shared.setdefault(scheme, scheme)
        return schemes

    def _plain_stack(self, name: str, headers: Mapping[str, Stored]) -> Scheme | None:
        """The scheme of stacked experts without any quantised tensor, as tools leave them that quantise modules only.

        Formats decide this for modules by the suffix `.weight`, which a stacked parameter does not have.
        """
        plain = headers.get("")
        alone = plain is not None and plain.dtype in FLOATS and not set(headers) - {"", *BIAS.suffix}
        return dense(Module(name, headers)) if self.form.stacked and alone else None

    def _check_plain(self, scheme: Scheme, name: str, headers: Mapping[str, Stored]) -> None:
        """Raise if the config leaves a module unquantised that is stored as codes and scales."""
        part = scheme.part("codes")
        if scheme.spec.quantized or part is None:
            return
        plain = any(headers[suffix].dtype in FLOATS for suffix in part.suffix if suffix in headers)
        if not plain and set(headers) - {*part.suffix, *BIAS.suffix}:
            raise WrongDtype(
                "the tensors are quantised, but the config says that the module is not",
                where=name,
                expected=f"{name}{part.usual_suffix(self.form.parameters)} as {' or '.join(FLOATS)}",
                got=", ".join(sorted(suffix for suffix in headers)),
                hint=f"see what {self.config.source} targets, and its list of modules that are left out"
                if self.config.method
                else "copy the section 'quantization_config' from the config.json that these tensors came with",
            )

    def _geometry(self, schemes: Mapping[tuple[int | None, str], Scheme]) -> tuple[int, int, int] | None:
        """(experts, hidden, intermediate) from the config, else from the tensors."""
        experts, hidden, inter = self.experts, self.sizes.hidden, self.sizes.intermediate
        if experts > MAX_EXPERTS:
            self.problems.append(
                BadValue(
                    "the layer has too many experts",
                    where=self.where,
                    expected=f"<= {MAX_EXPERTS}",
                    got=experts,
                )
            )
            return None
        if hidden is None or inter is None:
            down = next((key for key in schemes if key[1] == DOWN), None)
            inferred = self._infer(schemes[down], down) if down else {}
            hidden, inter = hidden or inferred.get("n"), inter or inferred.get("k")
        if not experts or not hidden or not inter:
            self.problems.append(
                MissingTensor(
                    "the size of the experts follows neither from the config nor from the tensors",
                    where=self.where,
                    expected="num_experts, hidden_size and moe_intermediate_size in config.json",
                )
            )
            return None
        return experts, hidden, inter

    def _stored_experts(self) -> int:
        if not self.form.stacked:
            return max((e for e, _ in self.modules if e is not None), default=-1) + 1
        first = next(iter(self.modules.values()))
        return max((self.tensors[n].shape[0] for n in first.names.values() if self.tensors[n].shape), default=0)

    def _infer(self, scheme: Scheme, key: tuple[int | None, str]) -> dict[str, int]:
        part = scheme.part("codes")
        for suffix in part.suffix if part else ():
            tensor = self.modules[key].names.get(suffix)
            if part is None or tensor is None:
                continue
            stored = self.tensors[tensor]
            shape = stored.shape[1:] if self.form.stacked else stored.shape
            if len(shape) == len(ax.parse(part.axes[0])) and stored.dtype in part.dtypes:
                return ax.infer(part.axes[0], shape, part.ratio(stored.dtype))
        return {}

    def _resolve(
        self, schemes: Mapping[tuple[int | None, str], Scheme], expert: int, stored: str, hidden: int, inter: int
    ) -> Iterable[Projection]:
        """The projections of one expert in a stored module: two if it is fused."""
        key = (None if self.form.stacked else expert, stored)
        where = f"{self.where}, expert {expert}, {stored}"
        if key not in schemes:
            if key not in self.modules:
                self._missing_module(schemes, key, expert, where)
            return
        scheme, module = schemes[key], self._module_name(expert, stored)
        n, k = (hidden, inter) if stored == DOWN else (inter, hidden)
        stored_n = 2 * n if stored == GATE_UP else n
        sources = self._sources(scheme, key, expert, stored_n, k, where)
        if sources is None:
            return
        base = Projection(
            self.index, expert, stored, module, scheme, n, k, sources, stored_n, mixture=self.naming.mixture
        )
        if stored != GATE_UP:
            yield base
            return
        step = 2 if self.form.interleaved else 1
        yield replace(base, name=GATE, first=0, step=step)
        yield replace(base, name=UP, first=1 if step == 2 else n, step=step)

    def _sources(
        self, scheme: Scheme, key: tuple[int | None, str], expert: int, n: int, k: int, where: str
    ) -> dict[str, StoredPart] | None:
        stored_names, sources, complete = self.modules[key].names, {}, True
        for part in scheme.parts:
            suffixes = [s for s in part.suffix if s in stored_names]
            if len(suffixes) > 1:
                self.problems.append(
                    DuplicateTensor(f"'{part.role}' is stored twice", where=where, got=", ".join(suffixes))
                )
            if not suffixes:
                if self._is_required(part):
                    complete = False
                    self._missing(part, expert, key, where)
                continue
            source = self._source(part, stored_names[suffixes[0]], expert, n, k, key[1], where)
            if source is not None:
                sources[part.role] = source
            complete = complete and source is not None
        return sources if complete else None

    def _missing_module(
        self, schemes: Mapping[tuple[int | None, str], Scheme], key: tuple[int | None, str], expert: int, where: str
    ) -> None:
        """Report every tensor of a module that has none, using the scheme of the same module in another expert."""
        sibling = next((scheme for other, scheme in schemes.items() if other[1] == key[1]), None)
        module = Module(self._module_name(expert, key[1]))
        scheme = sibling or self.format.scheme(self.config, module)
        for part in scheme.parts:
            if self._is_required(part):
                self._missing(part, expert, key, where, self._other_names(expert, key[1]))

    def _is_required(self, part: Part) -> bool:
        return not part.optional or (part.role == "bias" and self.naming.biased)

    def _missing(
        self, part: Part, expert: int, key: tuple[int | None, str], where: str, others: Iterable[str] = ()
    ) -> None:
        modules = (self._module_name(expert, key[1]), *others)
        expected = " or ".join(module + self._suffix(part) for module in modules)
        self.problems.append(MissingTensor(f"'{part.role}' is missing", where=where, expected=expected))

    def _other_names(self, expert: int, stored: str) -> list[str]:
        """What a missing module would be called in the rival forms, where gate and up may be fused or apart."""
        alike = {GATE: (GATE, GATE_UP), UP: (UP, GATE_UP), GATE_UP: (GATE_UP, GATE, UP)}.get(stored, (stored,))
        forms = [(form, name) for form in self.rivals for name in alike if name in form.names]
        names = [form.module(self.prefix, self.index, expert, name) for form, name in forms]
        return [name for name in dict.fromkeys(names) if name != self._module_name(expert, stored)]

    def _suffix(self, part: Part) -> str:
        """The suffix that the layer's other modules use for this part, else the usual one."""
        used = {suffix for module in self.modules.values() for suffix in module.names}
        usual = part.usual_suffix(self.form.parameters and not self.format.stacked)
        return next((suffix for suffix in part.suffix if suffix in used), usual)

    def _source(
        self, part: Part, tensor: str, expert: int, n: int, k: int, stored: str, where: str
    ) -> StoredPart | None:
        header = self.tensors[tensor]
        if header.dtype not in part.dtypes:
            self.problems.append(
                WrongDtype(
                    f"'{part.role}' in {tensor}", where=where, expected=" or ".join(part.dtypes), got=header.dtype
                )
            )
            return None
        transposed = stored in self.form.transposed
        expected: list[tuple[int, ...]] = []
        ways = ((axes, flip) for axes in part.axes for flip in orientations(axes, transposed))
        for axes, flip in ways:
            shape = ax.shape(axes, n, k, part.ratio(header.dtype))
            shape = shape[::-1] if flip else shape
            for candidate, index in self._stackings(shape, axes, expert):
                expected.append(candidate)
                if ax.fits(candidate, header.shape):
                    rows = shape[0] if self.form.flat and shape else 0
                    return StoredPart(tensor, part, axes, header.dtype, index, flip, rows)
        listed = " or ".join(str(list(s)) for s in dict.fromkeys(expected))
        self.problems.append(
            WrongShape(f"'{part.role}' in {tensor}", where=where, expected=listed, got=list(header.shape))
        )
        return None

    def _stackings(
        self, shape: tuple[int, ...], axes: str, expert: int
    ) -> Iterable[tuple[tuple[int, ...], int | None]]:
        """The shapes this part may have, each with the expert's index along the first axis (None: not stacked)."""
        if not self.form.stacked:
            yield shape, None
        elif self.form.flat and shape:
            yield (self.experts * shape[0], *shape[1:]), expert
        else:
            yield (self.experts, *shape), expert
            if self.sizes.zero_experts:  # transformers' LongCat has rows for them that nothing reads
                yield (self.experts + self.sizes.zero_experts, *shape), expert
            if not axes:
                yield (), None  # one scalar for all experts

    def _check_strays(self, experts: int) -> None:
        for (expert, stored), module in self.modules.items():
            if expert is not None and expert >= experts + self.sizes.zero_experts:
                self.problems.append(
                    UnexpectedTensor(
                        "the config has no such expert",
                        where=f"{self.where}, expert {expert}, {stored}",
                        expected=f"experts 0 to {experts - 1}",
                        got=next(iter(module.names.values())),
                    )
                )

    def _check_agreement(self, projections: Mapping[tuple[int, str], Projection], experts: list[int]) -> None:
        """Experts share a spec; an optional part is present for all experts or for none; no tensor is left over."""
        for group in ((GATE, UP), (DOWN,)):
            members = [p for e in experts for name in group if (p := projections.get((e, name)))]
            if not members:
                continue
            self._check_specs(members)
            present = {role for p in members for role in p.sources}
            for role in sorted(present):
                for p in members:
                    if role not in p.sources and (part := p.scheme.part(role)) is not None:
                        what = f"'{role}' is present for other experts but not here"
                        expected = p.module + self._suffix(part)
                        self.problems.append(MissingTensor(what, where=p.where, expected=expected))
        self._check_suffixes(projections)

    def _check_specs(self, members: list[Projection]) -> None:
        first = members[0]
        for p in members[1:]:
            if (p.scheme.spec, p.scheme.act_order) != (first.scheme.spec, first.scheme.act_order):
                self.problems.append(
                    MixedSpecs(
                        "all experts of a layer, and gate and up, must have the same spec",
                        where=p.where,
                        expected=f"{_kind(first.scheme)}, as {first.where}",
                        got=_kind(p.scheme),
                        hint="`lancebill convert` gives all of them one spec",
                    )
                )

    def _check_suffixes(self, projections: Mapping[tuple[int, str], Projection]) -> None:
        suffixes = {
            p.module: {*p.scheme.unread, *(s for part in p.scheme.parts for s in part.suffix)}
            for p in projections.values()
        }
        for (expert, stored), module in self.modules.items():
            name = self._module_name(expert or 0, stored)
            for suffix, tensor in module.names.items():
                if name in suffixes and suffix not in suffixes[name]:
                    self.problems.append(
                        UnexpectedTensor(
                            "this format has no tensor with this suffix",
                            where=f"{self.where}, expert {expert if expert is not None else 'all'}, {stored}",
                            expected=", ".join(sorted(suffixes[name])),
                            got=tensor,
                        )
                    )


def _kind(scheme: Scheme) -> str:
    return f"{scheme.spec} with act-order" if scheme.act_order else str(scheme.spec)
