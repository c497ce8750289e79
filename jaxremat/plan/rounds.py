"""`within`: compile in the loop. The model proposes, the target's compiler says what that needs, and the model is corrected."""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from jaxremat.plan.candidate import Candidate
from jaxremat.plan.judge import Judge, Verdict
from jaxremat.plan.neighbours import filled, with_cuts_for_the_last, with_one_more, with_small_of_the_last
from jaxremat.plan.search import Search
from jaxremat.plan.task import BLOCKS, EVERY, standard

# So many plans are compiled, and one more for the least that would be better; or so many while nothing has fitted.
_ROUNDS, _MOST_ROUNDS = 4, 8
# Where the plan for a limit was compiled before, so many beside it are tried, at distances that double from this part on.
_NUDGES, _NUDGE = 10, 8192
# So often the limit is halved in the search for the least that is better.
_HALVINGS = 8
# So many standard policies that are expected to need little are asked where nothing has fitted.
_LEAN = 4
# Those that would be better are asked even where they are expected to exceed the limit by this part: some compilers put values
# into the memory of results that are not there yet, which the model does not picture.
_NEARLY = 16
# Another round must promise to save at least this part of a forward pass.
_WORTH = 0.001
# The model's limit moves by at least this part.
_RETREAT = 64
# So many plans that failed by small values alone are asked for without them.
_BARE = 2
# Where the model expected this part too much of all that was compiled, so many more are asked for that it expects not to fit.
_FAR, _FURTHER = 0.125, 2
# So many of those that store what blocks give, and behind the last but one what a minimum cut does, are asked for.
_LAST = 6
# What is left of the limit is filled until so many have failed or were tried, where that is at least this part of it.
_FILLS, _NEAR_FILLS, _MOST_FILLS, _SPARE = 2, 6, 8, 128
# What exceeds the limit by at most this part is near it. Where nothing fits, and the smallest is near, so many that store one
# value more are asked for.
_NEAR, _NEIGHBOURS = 256, 12

_Found = TypeVar("_Found")


def within(search: Search, judge: Judge, limit: int, baseline: Verdict) -> tuple[Verdict, float]:
    """Returns the best verdict within a limit, or the smallest one where none is; and the seconds spent searching.

    The model is asked for plans under a limit of its own, moved until the compiler's peak meets the budget: what the
    compiler allotted beyond the prediction for one plan is expected for the next one, too.
    """
    rounds = _Rounds(search, judge, limit, baseline)
    rounds.mixtures()
    rounds.standards()
    rounds.further()
    rounds.last_part()
    rounds.bare()
    rounds.fill()
    rounds.near()
    return rounds.fit or min(rounds.verdicts, key=lambda v: v.peak_bytes), rounds.seconds


def bytes_beside(search: Search, baseline: Verdict) -> int:
    """What the compiled step reads beside what the loss reads: optimizer state, a whole data set."""
    return max(0, (baseline.argument_bytes or 0) - search.input_bytes)


def _beyond(verdict: Verdict) -> int:
    """What the compiler allotted beyond what the model expected."""
    return verdict.peak_bytes - verdict.candidate.predicted_bytes


class _Rounds:
    """What was asked for one limit, and what came of it. `seconds` were spent searching."""

    def __init__(self, search: Search, judge: Judge, limit: int, baseline: Verdict) -> None:
        self._search, self._judge, self._limit, self._baseline = search, judge, limit, baseline
        self.seconds = 0.0

    @property
    def verdicts(self) -> list[Verdict]:
        """All that is known, from other limits, too."""
        return [v for v in self._judge.verdicts.values() if v.refusal is None]

    @property
    def fit(self) -> Verdict | None:
        """The best that is within the limit."""
        fitting = (v for v in self.verdicts if v.peak_bytes <= self._limit)
        return min(fitting, key=lambda v: (v.candidate.order[:2], v.peak_bytes), default=None)

    def _timed(self, find: Callable[[], _Found]) -> _Found:
        start = time.perf_counter()
        found = find()
        self.seconds += time.perf_counter() - start
        return found

    def _is_worth(self, candidate: Candidate) -> bool:
        """Says whether a candidate saves enough against the best that fits to compile it."""
        if self.fit is None:
            return True
        fit = self.fit.candidate
        return candidate.order < fit.order and fit.cost - candidate.cost > _WORTH * self._search.forward_cost

    def mixtures(self) -> None:
        """Asks for what the model finds best, under limits of its own."""
        limit, judge = self._limit, self._judge
        asked = limit - bytes_beside(self._search, self._baseline)
        if others := self._others:  # a limit before this one led to them
            asked = limit - _beyond(min(others, key=lambda v: abs(v.peak_bytes - limit)))
        low, high = 0, 2 * max(limit, asked)  # the model's limits that were found to fit, and not to
        misses = number = 0
        while number < (_MOST_ROUNDS if judge.compiles else 1):
            if number >= _ROUNDS and self.fit is not None:
                break
            tried, candidate = self._timed(lambda asked=asked, low=low, high=high: self._new(asked, low, high))
            if candidate is None or not self._is_worth(candidate):
                if not asked < self._top < high:
                    break
                asked = self._top  # what is known is better, up to here
                continue
            verdict = judge.ask(candidate)
            number += 1
            if verdict.refusal is not None:
                continue  # what is beside it may compile
            if verdict.peak_bytes <= limit:
                low = max(low, tried)
                if candidate.cost <= self._search.bound(limit):
                    break
                asked = max(limit - _beyond(verdict), low + low // _RETREAT)
            else:
                high = min(high, tried)
                asked = min(limit - _beyond(verdict), high - (high << misses) // (8 * _RETREAT))
                misses += 1
            if not low < asked < high:
                asked = (low + high) // 2
        if judge.compiles and self.fit is not None:
            least = self._timed(lambda: self._least_better(low, min(high, self._top)))[1]
            if least is not None and self._is_worth(least):
                judge.ask(least)

    @property
    def _others(self) -> list[Verdict]:
        """All that is known but no rematerialization, of which the model knows least."""
        return [v for v in self.verdicts if v is not self._baseline]

    @property
    def _top(self) -> int:
        """The model's largest limit that may fit: where the compiler needs less than expected by as much as it ever did."""
        top = self._limit - min(map(_beyond, self._others), default=0)
        return top + top // _RETREAT

    def _least_better(self, low: int, high: int) -> tuple[int, Candidate | None]:
        """Returns what the model expects to need least of all that is better than the best that fits, if that is new."""
        found = None
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            candidate = self._search.best(middle)
            if candidate is not None and self._is_worth(candidate):
                found, high = candidate, middle
            else:
                low = middle
        is_new = found is not None and found.policy not in self._judge.verdicts
        return high, found if is_new else None

    def _new(self, asked: int, low: int, high: int) -> tuple[int, Candidate | None]:
        """Returns what the model finds best near a limit and no compiler has seen, and under which; None for nothing new."""
        nudges = [sign * (asked << i) // _NUDGE for i in range(_NUDGES) for sign in (-1, 1)]
        for tried in (asked, *(asked + nudge for nudge in nudges)):
            if low < tried < high:
                candidate = self._search.best(tried)
                if candidate is not None and (candidate.policy not in self._judge.verdicts or not self._judge.compiles):
                    return tried, candidate
        return asked, None

    def standards(self) -> None:
        """Asks for the standard policies that would be better; and where nothing fits, for what is expected to need least."""
        # What the compiler allots beyond the model, at least: a candidate that exceeds the budget by more is not worth asking.
        beyond = min(map(_beyond, self.verdicts))
        known = standard(self._search)
        most = self._limit + self._limit // _NEARLY - min(beyond, 0) + self._search.near_bytes
        for candidate in known:
            hopeful = candidate.predicted_bytes <= most or not self._judge.compiles
            if hopeful and (self.fit is None or candidate.order < self.fit.candidate.order):
                self._judge.ask(candidate)
        if self.fit is None:
            self._judge.ask(self._search.leanest())
        for candidate in sorted(known, key=lambda c: c.predicted_bytes)[:_LEAN]:
            if self.fit is None:
                self._judge.ask(candidate)

    def further(self) -> None:
        """Asks for what is better and should not fit, where the model expected far too much of all that it proposed."""
        for _ in range(_FURTHER if self._judge.compiles else 0):
            known = self._others
            if self.fit is None or any(v.peak_bytes > (1 - _FAR) * v.candidate.predicted_bytes for v in known):
                return
            better = self._timed(lambda: self._least_better(self._top, 2 * self._top))[1]
            if better is None or not self._is_worth(better) or self._judge.ask(better).peak_bytes > self._limit:
                return

    def last_part(self) -> None:
        """Asks for what stores what blocks give, and of the last of them what a minimum cut does.

        What is stored behind the last border is all in use when the backward pass begins: there the peak may be, and the
        model's error with it, which is much the same for all of them.
        """
        if not self._search.has_blocks or not self._judge.compiles:
            return
        search = self._search
        known = self._timed(lambda: [c for every in EVERY for c in with_cuts_for_the_last(search, BLOCKS, every)])
        beyond, asked = min(map(_beyond, self._others), default=0), 0
        for candidate in sorted(known, key=lambda c: c.order):
            if asked == _LAST or not self._is_worth(candidate):
                return
            if candidate.predicted_bytes + beyond <= self._limit and candidate.policy not in self._judge.verdicts:
                self._judge.ask(candidate)
                asked += 1

    def bare(self) -> None:
        """Asks once more, without their small values, for those of what failed that may have failed by these alone.

        Or only just: what is not broadcast from them may leave a compiler another order, which no model pictures. If that
        fails too, with those of the last part, which are read first.
        """
        failed = [v for v in self.verdicts if v.peak_bytes > self._limit and self._judge.compiles]
        asked = 0
        for verdict in sorted(failed, key=lambda v: v.candidate.order):
            if asked == _BARE or not self._is_worth(verdict.candidate):
                break
            search, asked_for = self._search, verdict.candidate
            candidate, small = search.without_small(asked_for)
            may_fit = small > 0 and verdict.peak_bytes - max(small, self._limit // _NEAR) <= self._limit
            if may_fit and self._is_worth(candidate):
                asked += 1
                if self._judge.ask(candidate).peak_bytes > self._limit and search.has_blocks:
                    candidate = with_small_of_the_last(search, asked_for, BLOCKS)
                    if candidate is not None and self._is_worth(candidate):
                        self._judge.ask(candidate)

    def fill(self) -> None:
        """Asks for what stores more than the best that fits, by what is left of the limit; by less where that fails.

        A compiler with memory beside the main one may put it there, and is asked oftener.
        """
        near = self._search.near_bytes
        failed, most = 0, self._limit
        for _ in range(_MOST_FILLS if self._judge.compiles else 0):
            if self.fit is None or failed == (_NEAR_FILLS if near else _FILLS):
                return
            spare = min(most, self._limit - self.fit.peak_bytes + near)
            if self.fit is self._baseline or spare < self._limit // _SPARE:
                return
            candidate = self._timed(partial(filled, self._search, self.fit.candidate, spare))
            if candidate is None or not self._is_worth(candidate):
                return
            is_new = candidate.policy not in self._judge.verdicts
            if self._judge.ask(candidate).peak_bytes > self._limit:
                most = spare // 2
                failed += is_new

    def near(self) -> None:
        """Asks for what stores one value more than the smallest, where that is only just too large.

        Whether operations of that part of the function are put off by a compiler may hang on one value.
        """
        if self.fit is not None or not self._judge.compiles:
            return
        least = min(self.verdicts, key=lambda v: v.peak_bytes)
        if least.peak_bytes - self._limit > self._limit // _NEAR:
            return
        for candidate in with_one_more(self._search, least.candidate, _NEIGHBOURS):
            if self._judge.ask(candidate).peak_bytes <= self._limit:
                break
