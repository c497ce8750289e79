"""The backward program of a choice: gradients from what is stored.

It recomputes what was not stored *just in time*: when a backward equation first needs a missing value,
the stored values that the recomputation starts from pass through one `optimization_barrier` together with the cotangent
which that equation reads. So no compiler can merge the recomputation with the forward pass (they are different values now)
or start it before the backward pass has come that far. One barrier opens as much as the choice allows: it stays open until
an equation needs a stored value that has not passed it, so a segment is recomputed behind a single gate and fuses freely.
What reads the cotangent afterwards reads it from behind the gate: a compiler drops from a barrier what nothing reads. Inputs
that are only transposed for products pass none.

More kinds of barriers hold the compiler to the order in which memory was meant to be freed. A convolution's kernel and other
operands that compilers prepare in arrays of their own wait for the cotangent. What follows the gradient of a weight or bias
waits for it: compilers would put it off, and keep what it is made of. And so does what is recomputed after the cotangent of a
concatenation was split: the parts that are read later are written before it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxremat import compat, pooled
from jaxremat.choice import Choice
from jaxremat.compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxremat.fusion import CONTRACTIONS
from jaxremat.graph import CONSTANTS, Graph, live, size_bytes
from jaxremat.inline import resolve, traced

# Equations whose operands compilers prepare in arrays of their own (other layouts, padding, indices of maxima), which must wait
# for the cotangent like what is recomputed: they would be made early or shared with the forward pass, and be kept.
_PREPARE = frozenset(("conv_general_dilated", pooled.NAME))
# Equations that a bias gets its gradient from; of cotangents of fewer bytes they may be put off: a barrier behind a small sum
# saves nothing, and compilers round it otherwise.
_SUMS = frozenset(("reduce_sum",))
_LEAST_SUMMED = 2**20
# Equations that cut the cotangent of a concatenation. Where each layer concatenates something to what it reads (DenseNet), that
# is cut and added to layer by layer, which compilers would put off as a whole, keeping what all layers add.
_CUTS = frozenset(("split",))
_LOOPS = frozenset(("scan", "while"))
_LAYOUTS = frozenset(("transpose", "reshape", "squeeze", "expand_dims"))


@dataclass(frozen=True)
class Backward:
    """The backward program, and which of its possible arguments it takes.

    Attributes:
        program: (stored values and inputs that it reads, cotangents that it reads) -> gradients.
        reads: the stored values and inputs, in the program's order.
        cotangents: the positions of the outputs whose cotangents it reads.
        gradients: the positions of the inputs whose gradients it returns.
    """

    program: ClosedJaxpr
    reads: Sequence[Var]
    cotangents: Sequence[int]
    gradients: Sequence[int]


def backward_program(choice: Choice, zero: Sequence[bool], is_body: bool = False) -> Backward:
    """Returns the program that computes gradients from stored values.

    Args:
        choice: what is stored.
        is_body: whether it runs inside of a loop.
        zero: for every output whether its cotangent is known to be zero. Backward equations that only see zeros are
            left out, with the recomputation that they alone would need.
    """
    graph = choice.graph
    writer = _Writer(choice, {ct for ct, z in zip(graph.cotangents, zero) if ct is not None and z}, is_body)
    for index, eqn in enumerate(graph.backward):
        if index not in graph.late:
            writer.write(eqn, index)
    gradients = {i: writer.result(g) for i, g in enumerate(graph.gradients) if g is not None and not writer.is_zero(g)}
    wanted = list(gradients.values())
    eqns = _trimmed(live(writer.eqns, (v for v in wanted if isinstance(v, Var))), wanted)
    read = {v for eqn in eqns for v in eqn.invars if isinstance(v, Var)} | {v for v in wanted if isinstance(v, Var)}
    stored = [var for var in (*choice.kept, *graph.inputs) if writer.entry(var) in read]
    cotangents = [i for i, ct in enumerate(graph.cotangents) if ct is not None and ct in read]
    invars = [
        *(writer.entry(var) for var in stored),
        *(ct for i in cotangents if (ct := graph.cotangents[i]) is not None),
    ]
    return Backward(compat.program(invars, wanted, eqns), stored, cotangents, list(gradients))


class _Writer:
    """Writes the backward equations in order, and before each the recomputation that it needs."""

    def __init__(self, choice: Choice, zeros: Collection[Var], is_body: bool) -> None:
        graph = choice.graph
        self.graph, self.kept, self.is_body = graph, choice.kept, is_body
        self.eqns = list[JaxprEqn]()
        self.inputs = set(graph.inputs)
        self.late_maker = {v: i for i in graph.late for v in graph.backward[i].outvars}
        self.made_by = {v: eqn for eqn in graph.backward for v in eqn.outvars}
        # When each backward value was written; the cotangents were there before all others.
        self.written_at = {ct: 0 for ct in graph.cotangents if ct is not None}
        self.names = dict[Var, Atom]()  # what stands for a backward value now: gated, or the other half of a sum
        self.zeros = set(zeros)
        self.skipped = dict[Var, JaxprEqn]()  # equations left out as all cotangents that they read are zero
        self.again = choice.again
        self.remade = set[Var]()  # forward and late values that are there again
        self.large_remade = dict[Var, int]()  # those of them that are not small, and behind which gate
        self.gate = dict[Var, Var]()  # stored values and inputs as they passed the gate that is open
        self.ends = _ends(graph.backward)
        # Results that the rest waits for, and a cotangent that the rest reads; and whether it is the gradient of a weight.
        self.finishing = dict[Var, tuple[Var, bool]]()
        # Sums that several gradients are of the same cotangent: how many are to come, and results that wait for the last.
        summed = (eqn for eqn in graph.backward if eqn.primitive.name in _SUMS and eqn.outvars[0] in self.ends)
        self.sums_to_come = Counter(self._shown(eqn.invars[0]) for eqn in summed if self._frees(eqn))
        self.summed = defaultdict[Atom, list[Var]](list)
        # JAX sums over the batch first, then over what is left of it: one row. By that row, its sum.
        sums = ((eqn.invars[0], eqn.outvars[0]) for eqn in graph.backward if eqn.primitive.name in _SUMS)
        self.sum_of_one = {
            v: out for v, out in sums if isinstance(v, Var) and size_bytes(v.aval) == size_bytes(out.aval)
        }
        self.gates = 0  # how many were opened so far
        self.index = 0  # of the equation that is written
        # Gradients of weights that nothing waits for yet, and the bytes of the cotangents that they keep.
        self.unfinished = dict[Var, int]()
        self.parts = list[Var]()  # large parts of cotangents that were cut
        self.readers = defaultdict[Var, set[str]](set)  # the names of the equations that read a value
        for eqn in (*graph.forward, *graph.backward):
            for var in eqn.invars:
                if isinstance(var, Var):
                    self.readers[var].add(eqn.primitive.name)
        self.last_read = {v: i for i, eqn in enumerate(graph.backward) for v in eqn.invars if isinstance(v, Var)}
        loops = (i for i, eqn in enumerate(graph.backward) if eqn.primitive.name in _LOOPS)
        self.last_loop = max(loops, default=-1)  # its index
        # Small stored values by position; and for each equation the newest position that it or a later one reads.
        self.small = {
            v: graph.value_of[v].position for v, mark in choice.kept.items() if not (self._is_large(v) or mark.host)
        }
        self.newest = _newest(graph)
        self.fetched = dict[Var, Var]()  # offloaded values, back in device memory
        self.hosts = {
            var: compat.new_var(var.aval.update(memory_space=jax.memory.Space.Host))
            for var, mark in choice.kept.items()
            if mark.host
        }

    def entry(self, var: Var) -> Var:
        """The variable under which a stored value enters the program."""
        return self.hosts.get(var, var)

    def is_zero(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and resolve(atom, self.names) in self.zeros

    def result(self, atom: Atom) -> Atom:
        """What stands for a gradient at the end."""
        if isinstance(atom, Var) and atom not in self.written_at:
            self._remake([atom], gate_on=None)
        return self._current(atom)

    def write(self, eqn: JaxprEqn, index: int) -> None:
        """Writes an equation that depends on a cotangent, unless all cotangents that it reads are zero."""
        self.index = index
        moving = [v for v in eqn.invars if isinstance(v, Var) and v in self.written_at]
        self.written_at.update(dict.fromkeys(eqn.outvars, len(self.written_at)))
        alive = [v for v in moving if not self.is_zero(v)]
        if not alive:
            self.zeros.update(eqn.outvars)
            self.skipped.update(dict.fromkeys(eqn.outvars, eqn))
        elif eqn.primitive.name == "add_any" and len(alive) < len(moving):
            self.names[eqn.outvars[0]] = resolve(alive[0], self.names)
        else:
            for var in moving:
                self._materialize(var)
            self._emit(eqn, max(moving, key=self.written_at.__getitem__))

    def _materialize(self, var: Var) -> None:
        """Writes what was skipped: a value that is zero, but is read beside one that is not."""
        root = resolve(var, self.names)
        if not isinstance(root, Var) or root not in self.zeros:
            return
        self.zeros.discard(root)
        if root not in self.skipped:
            return  # a cotangent of the function itself: the caller hands in zeros
        eqn = self.skipped[root]
        self.zeros.difference_update(eqn.outvars)
        moving = [v for v in eqn.invars if isinstance(v, Var) and v in self.written_at]
        for operand in moving:
            self._materialize(operand)
        self._emit(eqn, max(moving, key=self.written_at.__getitem__))

    def _emit(self, eqn: JaxprEqn, gate_on: Var) -> None:
        prepares = eqn.primitive.name in _PREPARE
        self._remake([v for v in eqn.invars if isinstance(v, Var) and v not in self.written_at], gate_on, prepares)
        passed = dict[Var, Var]()
        if prepares:
            passed = self._passed(self._early(eqn.invars), gate_on, eqn)
        invars = [passed[a] if isinstance(a, Var) and a in passed else self._current(a) for a in eqn.invars]
        written = eqn.replace(invars=invars)
        self.eqns.append(pooled.with_own_zeros(written) if eqn.primitive.name == pooled.NAME else written)
        if eqn.primitive.name in _CUTS:
            self.parts += filter(self._is_large, eqn.outvars)
        out = eqn.outvars[0]
        if out in self.ends and self._frees(eqn):
            self.finishing[self.ends[out]] = gate_on, eqn.primitive.name in CONTRACTIONS
        if out in self.finishing:
            self._finish(eqn, *self.finishing[out])

    def _frees(self, eqn: JaxprEqn) -> bool:
        """Says whether it pays to compute the gradient of a weight or bias at once, as something that it reads can go then.

        In the body of a loop it is added to those of other steps at the end alone, and takes memory of its own until then.
        """
        read = [v for v in eqn.invars if isinstance(v, Var)]
        if eqn.primitive.name in _SUMS:  # of a cotangent, which its partial sums would outlive
            return any(self._is_large(v) and size_bytes(v.aval) >= _LEAST_SUMMED for v in read)
        least = size_bytes(eqn.outvars[0].aval) if self.is_body else 0
        return any(size_bytes(v.aval) > least for v in read if v not in self.written_at)

    def _is_large(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and size_bytes(atom.aval) > self.graph.small_bytes

    def _finish(self, eqn: JaxprEqn, gate_on: Var, of_weight: bool) -> None:
        """Has what follows wait for an equation, so that what it reads can go.

        That follows the cotangent which the equation reads. Where nothing reads this any more, as the gradient of a weight was
        transposed once more behind its other readers, what waits is recomputation that would take more than the cotangent does.
        Of several sums of one cotangent (a bias and a table of positions) the last is waited for: they may be one fusion.
        """
        moving, out = self._narrowed(gate_on), eqn.outvars[0]
        if of_weight and not self._is_read_later(gate_on):
            self.unfinished[out] = size_bytes(gate_on.aval)
            # A gate has XLA:TPU write the cotangent, which it computes inside of the products otherwise; without loops to come,
            # XLA:GPU needs less with it.
            if eqn.primitive.name not in CONTRACTIONS and self.last_loop > self.index:
                return
        others = list[Var]()
        if not of_weight:
            summed = self._shown(gate_on)
            self.sums_to_come[summed] -= 1
            if self.sums_to_come[summed] > 0:
                self.summed[summed].append(self.sum_of_one.get(out, out))
                return
            others = self.summed.pop(summed, [])
        if not isinstance(moving, Var):
            return
        axes = compat.varying_axes(moving.aval)
        finished = [v for v in (*others, out) if compat.varying_axes(v.aval) == axes]
        if finished:
            gate = compat.barrier([*finished, moving], eqn)
            self.eqns.append(gate)
            self.names.update(zip((*finished, moving), gate.outvars))

    def _shown(self, atom: Atom) -> Atom:
        """The backward value that another one shows in another shape or order."""
        while isinstance(atom, Var) and atom in self.made_by and self.made_by[atom].primitive.name in _LAYOUTS:
            atom = self.made_by[atom].invars[0]
        return atom

    def _is_read_later(self, var: Var) -> bool:
        return self.last_read.get(var, -1) > self.index

    def _early(self, operands: Iterable[Atom]) -> list[Var]:
        """Those of some operands that are large and have been there since before the gate that is open."""
        large = (v for v in operands if isinstance(v, Var) and v not in self.hosts and self._is_large(v))
        return [v for v in large if self._is_stale(v)]

    def _is_stale(self, var: Var) -> bool:
        if var in self.large_remade:
            return self.large_remade[var] != self.gates
        return (var in self.kept or var in self.inputs) and var not in self.gate

    def _current(self, atom: Atom) -> Atom:
        """What stands for an operand of a backward equation."""
        if isinstance(atom, Literal):
            return atom
        if atom in self.gate:
            return self.gate[atom]
        return self.fetched[atom] if atom in self.hosts else resolve(atom, self.names)

    def _remake(self, wanted: Sequence[Var], gate_on: Var | None, prepares: bool = False) -> None:
        """Writes the recomputation of those of the wanted values that are not there, behind a gate on a cotangent.

        Where the equation that wants them prepares its operands, all that is large passes a gate.
        """
        forward, late, frontier = self._missing(wanted)
        while steps := self._steps(forward):
            # On the way to them all else is recomputed for them alone.
            self._write(*self._missing(steps), steps, gate_on, only=set(steps))
            forward, late, frontier = self._missing(wanted)
        self._write(forward, late, frontier, wanted, gate_on, prepares=prepares)

    def _steps(self, forward: Sequence[int]) -> list[Var]:
        """The values of the lowest level that are to be kept, and are recomputed now."""
        on_the_way = [
            v for i in forward for v in self.graph.forward[i].outvars if v in self.again and v not in self.remade
        ]
        lowest = min((self.again[v] for v in on_the_way), default=0)
        return [v for v in on_the_way if self.again[v] == lowest]

    def _write(
        self,
        forward: Sequence[int],
        late: Sequence[int],
        frontier: Mapping[Var, None],
        wanted: Sequence[Var],
        gate_on: Var | None,
        only: Collection[Var] | None = None,
        prepares: bool = False,
    ) -> None:
        """Writes equations behind a gate. Their results are there afterwards; with `only`, these and no others."""
        for var in (*frontier, *wanted):
            if var in self.hosts and var not in self.fetched:
                self._fetch(var, gate_on)
        opened = dict[Var, Var]()
        eqns = [*(self.graph.forward[i] for i in forward), *(self.graph.backward[i] for i in late)]
        if forward and gate_on is not None and not self._are_transposed_inputs(eqns, frontier):
            # Small values pass along with large ones, but ask for no gate of their own: it would break a fusion.
            if not self.gate.keys() >= self._to_gate(eqns, frontier).keys():
                makers = (eqn for eqn in eqns if eqn.primitive.name in (*CONTRACTIONS, *_LOOPS))
                made = sum(size_bytes(v.aval) for eqn in makers for v in eqn.outvars)
                waited_for = [v for v, size in self.unfinished.items() if size <= made]
                self._open(list(frontier), gate_on, eqns[0], waited_for)
                self.unfinished = {v: size for v, size in self.unfinished.items() if size > made}
            opened = self.gate
        elif prepares and late and gate_on is not None:
            opened = self._passed(self._early(frontier), gate_on, eqns[0])
        passing = dict[Var, Var]()  # what is dropped again
        for eqn in eqns:
            gated = {v: opened[v] for v in eqn.invars if isinstance(v, Var) and v in opened and self._is_there(v)}
            names = gated | passing
            invars = [names[v] if isinstance(v, Var) and v in names else self._current(v) for v in eqn.invars]
            # An equation with several outputs may be run again for one of them while another is stored.
            there = [self._is_there(v) or (only is not None and v not in only) for v in eqn.outvars]
            outvars = [compat.new_var(v.aval) if is_there else v for v, is_there in zip(eqn.outvars, there)]
            self.eqns.append(eqn.replace(invars=invars, outvars=outvars))
            if only is not None:
                passing.update((v, new) for v, new in zip(eqn.outvars, outvars) if v not in only)
            remade = [v for v, is_there in zip(eqn.outvars, there) if not is_there]
            self.remade.update(remade)
            self.large_remade.update(dict.fromkeys(filter(self._is_large, remade), self.gates))

    def _are_transposed_inputs(self, eqns: Sequence[JaxprEqn], frontier: Collection[Var]) -> bool:
        """Says whether nothing but inputs is transposed, for products alone: these read them so, and no copy is kept.

        A gate would have the cotangent written, of which that of all logits may be the largest value of all.
        """
        return self.inputs.issuperset(frontier) and all(
            eqn.primitive.name == "transpose" and self.readers[eqn.outvars[0]] == {"dot_general"} for eqn in eqns
        )

    def _is_there(self, var: Var) -> bool:
        return var in self.kept or var in self.inputs or (var in self.again and var in self.remade)

    def _missing(self, wanted: Sequence[Var]) -> tuple[list[int], list[int], dict[Var, None]]:
        """Forward and late equations to run, in order, and the stored values and inputs that they start from."""
        forward, late, frontier = set[int](), set[int](), dict[Var, None]()
        todo = [v for v in wanted if not self._is_there(v)]
        while todo:
            var = todo.pop()
            if self._is_there(var):
                frontier[var] = None
                continue
            if var in self.remade:
                continue
            if var in self.late_maker:
                index, done, eqn = self.late_maker[var], late, self.graph.backward[self.late_maker[var]]
            else:
                index, done, eqn = self.graph.maker[var], forward, self.graph.forward[self.graph.maker[var]]
            if index not in done:
                done.add(index)
                todo += [v for v in eqn.invars if isinstance(v, Var)]
        return sorted(forward), sorted(late), frontier

    def _to_gate(self, eqns: Sequence[JaxprEqn], frontier: Collection[Var]) -> dict[Var, None]:
        """Those of the stored values and inputs that must pass a gate before `eqns` run: large ones, and random keys.

        What is computed from small values alone is small: a compiler may take it from the forward pass. Where something
        large is made from small values (a dropout mask from its key), those are gated too.
        """
        limit = self.graph.small_bytes
        gated = {v: None for v in frontier if size_bytes(v.aval) > limit}
        moving = set(gated)
        sources = {v: frozenset((v,)) for v in frontier if v not in gated}
        for eqn in eqns:
            read = [v for v in eqn.invars if isinstance(v, Var)]
            if any(v in moving or v in self.large_remade for v in read):
                moving.update(eqn.outvars)
                continue
            origin = frozenset().union(*(sources.get(v, frozenset()) for v in read))
            if eqn.primitive.name not in CONSTANTS and any(size_bytes(v.aval) > limit for v in eqn.outvars):
                gated.update(dict.fromkeys(sorted(origin, key=list(frontier).index)))
                moving.update(eqn.outvars)
            else:
                sources.update(dict.fromkeys(eqn.outvars, origin))
        return gated

    def _open(self, frontier: Sequence[Var], gate_on: Var, like: JaxprEqn, unfinished: Collection[Var] = ()) -> None:
        """Opens a new gate: stored values that are there when a cotangent is and gradients are finished, and not before.

        With what the recomputation starts from now pass the small stored values that what is recomputed later may read: a
        compiler may write what is broadcast from them, and would share it with the forward pass.

        Inside of `shard_map` a barrier takes values that vary over the same axes of the mesh. A value that varies over
        fewer axes than the cotangent, such as a replicated weight, passes ungated.
        """
        if isinstance(self._narrowed(gate_on), Var):
            self.parts = list(filter(self._is_read_later, self.parts))
            self.gate = self._passed([*frontier, *self._along(frontier)], gate_on, like, (*self.parts, *unfinished))
            self.gates += 1

    def _along(self, frontier: Collection[Var]) -> list[Var]:
        """The small stored values behind the oldest of some stored values, but for those that nothing reads any more."""
        oldest = min((self.graph.value_of[v].position for v in frontier if v in self.kept), default=-1)
        newest = self.newest[self.index]
        return [v for v, position in self.small.items() if oldest <= position <= newest and v not in frontier]

    def _passed(
        self, values: Sequence[Var], gate_on: Var, like: JaxprEqn, parts: Collection[Var] = ()
    ) -> dict[Var, Var]:
        """Writes a barrier on values, a cotangent and parts of others; returns what stands for the values behind it."""
        moving = self._narrowed(gate_on)
        passed: dict[Var, Any] = {v: self.fetched.get(v, v) for v in values}
        if not isinstance(moving, Var):
            return passed
        groups = dict[frozenset[str], list[Var]]()
        for var in values:
            groups.setdefault(compat.varying_axes(var.aval), []).append(var)
        own_axes = compat.varying_axes(moving.aval)
        for axes, group in groups.items():
            if not axes >= own_axes:
                continue
            key = moving if axes == own_axes else self._varied(moving, axes - own_axes)
            along = [v for v in self._now(parts) if v is not moving and compat.varying_axes(v.aval) == axes == own_axes]
            gate = compat.barrier([*(passed[v] for v in group), *along, key], like)
            self.eqns.append(gate)
            passed.update(zip(group, gate.outvars))
            self.names.update(zip(along, gate.outvars[len(group) :]))
            if axes == own_axes:
                self.names[moving] = gate.outvars[-1]
                moving = gate.outvars[-1]
        return passed

    def _now(self, parts: Iterable[Var]) -> list[Var]:
        """What stands for backward values now, those that are zero left out."""
        now = dict.fromkeys(resolve(v, self.names) for v in parts)
        return [v for v in now if isinstance(v, Var) and v not in self.zeros]

    def _varied(self, var: Var, axes: Collection[str]) -> Var:
        """A cotangent as it enters a barrier beside values that differ over more axes of a mesh."""
        return self._add(lambda x: jax.lax.pcast(x, tuple(sorted(axes)), to="varying"), var)

    def _add(self, function: Callable[[Any], Any], operand: Var) -> Var:
        """Writes the equations of a function of one value; returns its result."""
        eqns, out = traced(function, operand)
        self.eqns += eqns
        return out

    def _narrowed(self, var: Var) -> Atom:
        """The cotangent to gate on: of a broadcast its source, which need not be written out to pass a barrier."""
        while var in self.made_by and self.made_by[var].primitive.name == "broadcast_in_dim":
            source = self.made_by[var].invars[0]
            if not isinstance(source, Var) or source not in self.written_at:
                break
            var = source
        return resolve(var, self.names)

    def _fetch(self, var: Var, gate_on: Var | None) -> None:
        """Brings an offloaded value back to the device once a cotangent is there."""
        like = self.graph.forward[self.graph.maker[var]]
        host = self.hosts[var]
        moving = self._narrowed(gate_on) if gate_on is not None else None
        if isinstance(moving, Var):
            gate = compat.barrier([host, moving], like)
            self.eqns.append(gate)
            host, self.names[moving] = gate.outvars[0], gate.outvars[1]
        self.fetched[var] = self._add(_from_host, host)


def _from_host(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Device, src=jax.memory.Space.Host)


def _newest(graph: Graph) -> list[int]:
    """For every backward equation the newest position of a forward value that it or a later one reads, -1 for none."""
    newest, found = -1, list[int]()
    for eqn in reversed(graph.backward):
        read = (graph.value_of[v].position for v in eqn.invars if isinstance(v, Var) and v in graph.value_of)
        newest = max(newest, *read, -1)
        found.append(newest)
    return found[::-1]


def _trimmed(eqns: Sequence[JaxprEqn], wanted: Iterable[Atom]) -> list[JaxprEqn]:
    """Returns the equations with no barrier on what nothing reads behind it, as long as it is on more than that."""
    read = {v for v in wanted if isinstance(v, Var)}
    found = list[JaxprEqn]()
    for eqn in reversed(eqns):
        if eqn.primitive.name == "optimization_barrier":
            pairs = [(a, v) for a, v in zip(eqn.invars, eqn.outvars) if v in read]
            if not pairs:
                continue
            eqn = eqn.replace(invars=[a for a, _ in pairs], outvars=[v for _, v in pairs])
        read.update(v for v in eqn.invars if isinstance(v, Var))
        found.append(eqn)
    return found[::-1]


def _ends(backward: Sequence[JaxprEqn]) -> dict[Var, Var]:
    """The results of convolutions, products and sums that no further product depends on, gradients of weights and biases.

    For each of them the value as which it leaves: a compiler may write a result in another layout at once, as long as nothing
    stands between.
    """
    leading = set[Var]()  # values that some convolution, product or loop depends on
    shown = dict[Var, Var]()  # for what is transposed or reshaped, the result
    ends = dict[Var, Var]()
    for eqn in reversed(backward):
        name, out = eqn.primitive.name, eqn.outvars[0]
        if name in (*CONTRACTIONS, *_SUMS) and out not in leading:
            while out in shown:
                out = shown[out]
            ends[eqn.outvars[0]] = out
        if name in ("transpose", "reshape") and isinstance(operand := eqn.invars[0], Var):
            shown[operand] = out
        if name in (*CONTRACTIONS, *_LOOPS) or any(v in leading for v in eqn.outvars):
            leading.update(v for v in eqn.invars if isinstance(v, Var))
    return ends
