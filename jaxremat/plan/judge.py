"""`Judge`: what the target's compiler says of candidates, each asked once; or, without a compiler, what the model says."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxremat import policy as p
from jaxremat.cost import Cost, cost, peak
from jaxremat.errors import CompileError, PolicyError
from jaxremat.plan.candidate import Candidate
from jaxremat.plan.result import short
from jaxremat.remat import remat
from jaxremat.text import human_bytes

_LOGGER = logging.getLogger(__name__)

Step = Callable[[Callable[..., Any]], tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class Verdict:
    """A candidate with its peak.

    `peak_bytes` is the compiler's, and where none was asked the model's. `argument_bytes` is what the program reads. A program that
    the compiler refused, for another reason than its memory, has that as its `refusal`, and a peak beyond all limits.
    """

    candidate: Candidate
    peak_bytes: int
    argument_bytes: int | None
    refusal: CompileError | None = None


_BEYOND_ALL = 1 << 62


class Judge:
    """Compiles a step under policies. Each is a line of the log `jaxremat.plan.judge`, level INFO.

    Args:
        loss: the function that is wrapped.
        step: from a loss to the step and its arguments; None for the value and gradient of the loss.
        args, kwargs: of the loss.
        argnums: what is differentiated.
        target: whose compiler; None asks none.
        counts_gaps: a peak is all that a run needs, the gaps between temporary values included.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        step: Step | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: int | Sequence[int],
        target: str | None,
        counts_gaps: bool = False,
    ) -> None:
        self._loss, self._step, self._args, self._kwargs = loss, step, args, kwargs
        self._argnums, self._target, self._counts_gaps = argnums, target, counts_gaps
        self.verdicts = dict[p.Policy, Verdict]()

    def check_refusals(self) -> Sequence[CompileError]:
        """Returns why programs were refused, for another reason than their memory.

        Raises:
            CompileError: all were, but that without rematerialization: the last of them.
        """
        found = [v.refusal for v in self.verdicts.values() if v.refusal is not None]
        if found and len(found) == len(self.verdicts) - 1:
            raise found[-1]
        return found

    @property
    def compiles(self) -> bool:
        """Whether a compiler is asked."""
        return self._target is not None

    def check(self, policy: p.Policy) -> None:
        """Traces the step that the caller gave under a policy that fits the planned function alone.

        Raises:
            PolicyError: the step calls or differentiates the loss otherwise than was planned for.
            TypeError: the step's builder returns no step.
        """
        if self._step is not None and self.compiles:
            step, args = _built(self._step, remat(self._loss, policy))
            try:
                jax.eval_shape(step, *args)
            except PolicyError as error:
                raise self._otherwise(error) from None

    def _otherwise(self, error: PolicyError) -> PolicyError:
        return PolicyError(
            "plan: the step must call the loss with arguments of the shapes that plan was given, and differentiate it with "
            f"respect to argnums={self._argnums}, as these are planned for; it does not: {error}"
        )

    def ask(self, candidate: Candidate) -> Verdict:
        """Returns the peak of a candidate.

        Raises:
            CompileError: the compiler refused the program without rematerialization for another reason than its memory.
            PolicyError: the step calls or differentiates the loss otherwise than was planned for.
            TypeError: the step's builder returns no step.
        """
        if candidate.policy not in self.verdicts:
            start = time.perf_counter()
            verdict = self.verdicts[candidate.policy] = self._compiled(candidate)
            if self.compiles:
                _LOGGER.info(
                    "%s: %s on %s, expected %s; %.1f s",
                    short(candidate.policy),
                    verdict.refusal or human_bytes(verdict.peak_bytes),
                    self._target,
                    human_bytes(candidate.predicted_bytes),
                    time.perf_counter() - start,
                )
        return self.verdicts[candidate.policy]

    def _compiled(self, candidate: Candidate) -> Verdict:
        if self._target is None:
            return Verdict(candidate, candidate.predicted_bytes, None)
        loss = remat(self._loss, candidate.policy)
        if self._step is None:
            argnums = self._argnums if isinstance(self._argnums, int) else tuple(self._argnums)
            step, args, kwargs = jax.value_and_grad(loss, argnums), self._args, self._kwargs
        else:
            step, args = _built(self._step, loss)
            kwargs = {}
        try:
            found = (cost if self._counts_gaps else peak)(step, *args, target=self._target, **kwargs)
        except PolicyError as error:
            if self._step is None:
                raise
            raise self._otherwise(error) from None
        except CompileError as error:
            if error.wanted_bytes is not None:
                return Verdict(candidate, error.wanted_bytes, None)
            if isinstance(candidate.policy, p.Everything):
                raise
            return Verdict(candidate, _BEYOND_ALL, None, error)  # others may compile
        most = found.needed_bytes if isinstance(found, Cost) else found.peak_bytes
        return Verdict(candidate, most, found.argument_bytes)


def _built(builder: Step, loss: Callable[..., Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns the training step and its arguments that a caller's builder makes of a loss."""
    built: Any = builder(loss)
    if not (isinstance(built, tuple) and len(built) == 2 and callable(built[0]) and isinstance(built[1], tuple | list)):
        raise TypeError(
            f"plan: step must return the training step and a tuple of its arguments, (function, (x, y)); got {built!r:.100}."
        )
    return built[0], built[1]
