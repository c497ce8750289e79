"""The planner's bench in tables: plain text for a terminal, Markdown for a page, both of the same rows."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from experiments.bench.plan_cells import Result
from experiments.bench.plan_claims import CLAIMS
from experiments.bench.plan_verdicts import (
    FRACTIONS,
    Row,
    Suite,
    compared_gradients,
    disagreements,
    distances,
    gradient_tolerance,
    part_of,
    prediction_errors,
    wrong_gradients,
)
from jaxremat.text import table

ROW_HEADINGS = ("net", "target", "against", "its peak, MiB", "again, GFLOP", "plan's peak", "again", "bound", "policy",
                "search, s", "outcome")  # fmt: skip
SUMMARY_HEADINGS = ("net", "target", "no remat, MiB", "competitors", "less", "same", "nothing", "misses",
                    *(f"{part:.0%}: again" for part in FRACTIONS), *(f"{part:.0%}: distance" for part in FRACTIONS),
                    "model off by", "search, s")  # fmt: skip
LEGEND = (
    "Against a competitor the planner got its compiled peak as the budget. less: the plan recomputes less; same: as much, "
    "with no more memory; nothing: neither recomputes anything; misses: it recomputes more, or no plan fits. Again: "
    "convolutions and matrix products beyond those without rematerialization, as a part of those of a step in the summary. "
    "Distance: of all that the plan recomputes to the lower bound, as a part of a step's operations. Competitors that need "
    "no less than no remat does are left out."
)


def rows(suite: Suite) -> list[list[str]]:
    """Returns the cells below `ROW_HEADINGS`: the competitors of each network and target, then the parts of no remat's peak."""
    found = list[list[str]]()
    for net, target in suite.places:
        base = suite.without_remat(net, target)
        for row in suite.rows(net, target):
            if row.outcome != "saves nothing":
                theirs = row.competitor.figures
                figures = [mib(theirs.peak_bytes), giga(theirs.recomputed_flops)] if theirs else ["-", "-"]
                found.append([net, target, str(row.competitor.cell.asked), *figures, *_plan(row.plan), row.outcome])
        for fraction in FRACTIONS if base is not None else ():
            assert base is not None
            size = part_of(base[0].peak_bytes, fraction)
            plan = suite.plan(net, target, size)
            if plan is not None:
                found.append([net, target, f"{fraction:.0%} of no remat", mib(size), "-", *_plan(plan), plan.status])
    return found


def _plan(plan: Result | None) -> list[str]:
    if plan is None or plan.figures is None or plan.planned is None:
        return ["-"] * 5
    told = plan.planned
    return [mib(plan.figures.peak_bytes), giga(plan.figures.recomputed_flops), giga(told.bound_flops), told.policy,
            f"{told.search_seconds:.1f}"]  # fmt: skip


def summary(suite: Suite) -> list[list[str]]:
    """Returns the cells below `SUMMARY_HEADINGS`: a row for each network and target."""
    apart, errors = {part: distances(suite, part) for part in FRACTIONS}, prediction_errors(suite)
    found = list[list[str]]()
    for place in suite.places:
        base = suite.without_remat(*place)
        if base is None:
            found.append([*place, "failed", *["-"] * (len(SUMMARY_HEADINGS) - 3)])
            continue
        compared = [row for row in suite.rows(*place) if row.outcome not in ("saves nothing", "not asked")]
        counts = Counter("miss" if row.is_miss else row.outcome for row in compared)
        plans = [suite.planned(*place, part_of(base[0].peak_bytes, part)) for part in FRACTIONS]
        again = ["-" if p is None else percent(p[0].recomputed_flops / base[1].contraction_flops) for p in plans]
        seconds = [plan.planned.search_seconds for plan in suite.plans(*place) if plan.planned is not None]
        found.append([
            *place, mib(base[0].peak_bytes), str(len(compared)),
            *(str(counts[outcome]) for outcome in ("less", "same", "nothing", "miss")), *again,
            *(percent(apart[part][place]) if place in apart[part] else "-" for part in FRACTIONS),
            percent(errors[place]) if place in errors else "-", f"{median(seconds):.1f}" if seconds else "-",
        ])  # fmt: skip
    return found


def misses(suite: Suite) -> list[tuple[Row, str]]:
    """Returns the rows in which the planner is at fault, each with a sentence."""
    return [(row, miss(row)) for place in suite.places for row in suite.rows(*place) if row.is_miss]


def faults(suite: Suite) -> list[str]:
    """Returns a sentence for each row in which the planner is at fault, and for each plan with a wrong gradient."""
    return [*(text for _, text in misses(suite)), *(wrong(*found) for found in wrong_gradients(suite))]


def wrong(plan: Result, apart: float) -> str:
    """Returns a sentence about a plan whose gradient is farther off than it may be."""
    tolerance = gradient_tolerance(plan.cell.net)
    asked = f"at most {tolerance:g}" if tolerance else "the same bits"
    return f"{_named(plan)}: the gradient is off by {apart:.2g} of a leaf's largest entry, asked for were {asked}"


def miss(row: Row) -> str:
    """Returns a sentence about a row in which the planner is at fault."""
    cell, theirs, plan = row.competitor.cell, row.competitor.figures, row.plan
    assert theirs is not None
    assert plan is not None
    head = (
        f"{cell.net} {cell.target}, {cell.asked}: {theirs.peak_bytes} bytes, {giga(theirs.recomputed_flops)} GFLOP again; "
        f"{row.outcome}: "
    )
    if plan.figures is None or plan.planned is None:
        return head + plan.why
    figures = f"{plan.figures.peak_bytes} bytes, {giga(plan.figures.recomputed_flops)} GFLOP again"
    return f"{head}plan ({plan.planned.policy}) {figures}"


def sentences(suite: Suite) -> list[str]:
    """Returns the claims, the medians, and all that is amiss beside the rows, a sentence each."""
    found = list[str]()
    for claim in CLAIMS:
        if claim.is_asked(suite):
            figure = claim.measured(suite)
            verdict = "holds" if claim.holds(suite) else "MISSED"
            kind = "Aim" if claim.is_aim else "Claim"
            shown = "no plan" if figure is None else f"{figure:.4g} {claim.unit}"
            found.append(
                f"{kind}: {claim.net} on {claim.target} at {claim.title}: {shown}, at most {claim.limit:g}: {verdict}."
            )
    for part in FRACTIONS:
        if apart := distances(suite, part):
            found.append(
                f"Distance to the lower bound at {part:.0%} of no remat's peak: median {percent(median(apart.values()))} of a "
                f"step's operations over {len(apart)} networks and targets."
            )
    if errors := prediction_errors(suite):
        found.append(
            f"The model's peak is off the compiled one by {percent(median(errors.values()))}, the median over {len(errors)} "
            "networks and targets of their medians."
        )
    found += _gradients(suite)
    for result in disagreements(suite):
        assert result.figures is not None
        assert result.planned is not None
        found.append(
            f"{_named(result)}: the plan reports {result.planned.told_peak_bytes} bytes and "
            f"{giga(result.planned.told_flops)} GFLOP, counted were {result.figures.peak_bytes} and "
            f"{giga(result.figures.recomputed_flops)}."
        )
    for place in suite.places:
        found += [f"Not monotone: {_told(more)}, {_told(less)}." for more, less in suite.unordered(*place)]
        found += [f"{_named(r)} failed: {r.why}" for r in suite.competitors(*place) if r.status == "failed"]
        found += [f"{_named(r)} {r.status}: {r.why}" for r in suite.plans(*place) if r.figures is None]
    return found


def _gradients(suite: Suite) -> list[str]:
    compared = compared_gradients(suite)
    if not compared:
        return []
    local = sum(r.planned is not None and r.cell.target == "local" for r in suite.results)
    same = sum(apart == 0 for _, apart in compared)
    plan, most = max(compared, key=lambda pair: pair[1])
    rest = f", the others within {most:.2g} of a leaf's largest entry ({plan.cell.net})" if most else ""
    return [
        f"Gradients of {len(compared)} of {local} local plans were compared with those without rematerialization: {same} "
        f"bit-identical{rest}."
    ]


def conditions(suite: Suite) -> str:
    """Returns one sentence with dates, hardware and versions."""
    results = suite.results
    if not results:
        return "Nothing was run."
    days = sorted({result.date[:10] for result in results})
    machines = dict.fromkeys(f"{r.hardware['cpu']}, {r.hardware['cores']} cores" for r in results)
    packages = dict.fromkeys(package for result in results for package in result.versions)
    told = [
        f"{package} {' and '.join(dict.fromkeys(r.versions[package] for r in results if package in r.versions))}"
        for package in packages
    ]
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Compiled {period} on {'; '.join(machines)}; {', '.join(told)}."


def plain(suite: Suite) -> str:
    """Returns everything for a terminal."""
    right = range(2, len(SUMMARY_HEADINGS))
    parts = [
        table(ROW_HEADINGS, rows(suite), right=(3, 4, 5, 6, 7, 9)),
        table(SUMMARY_HEADINGS, summary(suite), right=right),
        LEGEND,
        "\n".join([*(f"MISS: {text}" for text in faults(suite)), *sentences(suite), conditions(suite)]),
    ]
    return "\n\n".join(parts)


def markdown(suite: Suite) -> str:
    """Returns everything as Markdown: the summary, what is to be said about it, and the rows, folded."""
    parts = [_marked_down(SUMMARY_HEADINGS, summary(suite), 2), LEGEND]
    told = [*(f"miss: {text}" for text in faults(suite)), *sentences(suite)]
    if told:
        parts.append("\n".join(f"- {text}" for text in told))
    full = _marked_down(ROW_HEADINGS, rows(suite), 3)
    parts += [f"<details><summary>All rows</summary>\n\n{full}\n\n</details>", conditions(suite)]
    return "\n\n".join(parts)


def _marked_down(headings: Sequence[str], lines: Sequence[Sequence[str]], names: int) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    ruler = ["---"] * names + ["---:"] * (len(headings) - names)
    return "\n".join([line(headings), line(ruler), *map(line, lines)])


def mib(size_bytes: int) -> str:
    """Returns bytes in MiB."""
    return f"{size_bytes / 2**20:,.1f}"


def giga(flops: float) -> str:
    """Returns operations in units of 10^9, with the digits that a reader can use.

    Example:
        >>> giga(0), giga(18_520_000_000), giga(1_234_567_000_000), giga(1_500_000)
        ('0', '18.52', '1,235', '0.0015')
    """
    value = flops / 1e9
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 1 else f"{value:.2g}"


def percent(part: float) -> str:
    """Returns a part as a percentage.

    Example:
        >>> percent(0.12345), percent(0)
        ('12.3 %', '0.0 %')
    """
    return f"{100 * part:.1f} %"


def _named(result: Result) -> str:
    cell = result.cell
    asked = f"budget {cell.asked} bytes" if cell.kind == "plan" else cell.asked
    return f"{cell.net} {cell.target}, {asked}"


def _told(plan: Result) -> str:
    assert plan.figures is not None
    figures = f"{plan.figures.peak_bytes} bytes and {giga(plan.figures.recomputed_flops)} GFLOP"
    return f"{_named(plan)} gives {figures}"
