"""The comparison's tables as Markdown: a row a policy, the two frameworks beside each other, every column with its level."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.compare_records import Framework, Result

NAMES: dict[Framework, str] = {"jax": "JAX", "torch": "PyTorch"}
CONTRACTIONS = ("conv", "dot")


@dataclass(frozen=True)
class Group:
    """The results of one model on one batch and data set."""

    model: str
    batch_size: int
    dataset: str
    steps: int
    results: Sequence[Result]

    @property
    def policies(self) -> list[str]:
        """The policies in order."""
        return list(dict.fromkeys(result.cell.policy for result in self.results))

    def find(self, framework: Framework, policy: str) -> Result | None:
        """Returns the result of a policy in a framework, or None where there is none."""
        found = (r for r in self.results if (r.cell.framework, r.cell.policy) == (framework, policy))
        return next(found, None)


def groups(results: Sequence[Result]) -> list[Group]:
    """Returns results, those of one model on one batch and data set together, in order of first appearance."""
    by_key = dict[tuple[str, int, str, int], list[Result]]()
    for result in results:
        cell = result.cell
        by_key.setdefault((cell.model, cell.batch_size, cell.dataset, cell.steps), []).append(result)
    return [Group(*key, members) for key, members in by_key.items()]


def mib(size_bytes: int | None) -> str:
    """Returns bytes in MiB, with the digits that a reader can use.

    Example:
        >>> from experiments.compare_table import mib
        >>> mib(3 * 2**20), mib(2**16), mib(None)
        ('3.0', '0.062', '-')
    """
    if size_bytes is None:
        return "-"
    value = size_bytes / 2**20
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def step_text(result: Result) -> str:
    """Returns the median step in milliseconds with its interquartile range, or a dash.

    Example:
        >>> from experiments.compare_records import Cell, Result
        >>> from experiments.compare_table import step_text
        >>> cell = Cell("jax", "net", "dots", 16, "sample", 10, 0)
        >>> step_text(Result(cell, "measured", step_seconds=(0.01, 0.02, 0.03)))
        '20 (15-25)'
    """
    seconds = result.step_seconds
    if not seconds:
        return "-"
    if len(seconds) == 1:
        return _ms(seconds[0])
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{_ms(statistics.median(seconds))} ({_ms(low)}-{_ms(high)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}" if seconds >= 0.01 else f"{seconds * 1000:.1f}"


def contractions(result: Result) -> str:
    """Returns how many convolutions and matrix products are recomputed, or a dash where nobody can tell."""
    if result.recomputed is None:
        return "-"
    return "+".join(str(result.recomputed.get(op, 0)) for op in CONTRACTIONS)


HEADINGS = (
    "policy",
    "kept, MiB: JAX (traced)",
    "kept, MiB: PyTorch (counted)",
    "peak, MiB: JAX (compiled)",
    "peak, MiB: PyTorch (measured)",
    "step, ms: JAX",
    "step, ms: PyTorch",
    "conv+dot again: JAX",
    "conv+dot again: PyTorch",
    "accuracy: JAX",
    "accuracy: PyTorch",
)


def rows_of(group: Group) -> list[list[str]]:
    """Returns the rows below `HEADINGS`: policies that at least one framework measured, or that failed."""
    rows = list[list[str]]()
    for policy in group.policies:
        pair = [group.find("jax", policy), group.find("torch", policy)]
        if all(result is None or result.status == "refused" for result in pair):
            continue
        columns = [[_shown(result, column) for result in pair] for column in range(5)]
        rows.append([policy, *(text for column in columns for text in column)])
    return rows


def _shown(result: Result | None, column: int) -> str:
    if result is None or result.status == "refused":
        return "n/a"
    if result.status == "failed":
        return "failed"
    accuracy = "-" if result.test_accuracy is None else f"{result.test_accuracy:.2%}"
    return (mib(result.kept_bytes), mib(result.peak_bytes), step_text(result), contractions(result), accuracy)[column]


def left_out(group: Group) -> list[str]:
    """Returns a sentence for each cell without figures: by name, with the reason."""
    sentences = list[str]()
    frameworks: list[Framework] = [
        framework for framework in NAMES if any(r.cell.framework == framework for r in group.results)
    ]
    for policy in group.policies:
        for framework in frameworks:
            cell, result = f"{NAMES[framework]}, `{policy}`", group.find(framework, policy)
            if result is None:
                sentences.append(f"{cell} was not run")
            elif result.status != "measured":
                # Most reasons begin with the policy, which stands there already.
                sentences.append(f"{cell} {result.status}: {result.why.removeprefix(f'{policy}: ')}")
    return sentences


def notes(group: Group) -> list[str]:
    """Returns a sentence for each way in which a framework applied some policies: to each block, in how many segments."""
    policies = dict[tuple[Framework, str], list[str]]()
    for result in group.results:
        if result.status == "measured" and result.note:
            policies.setdefault((result.cell.framework, result.note), []).append(f"`{result.cell.policy}`")
    return [f"{NAMES[framework]}, {', '.join(found)}: {note}" for (framework, note), found in policies.items()]


def caption(group: Group) -> str:
    """Returns what a group's figures were taken from."""
    return f"{group.model}, batch {group.batch_size}; accuracy after {group.steps} steps on {_data(group.dataset)}"


def _data(dataset: str) -> str:
    return "CIFAR-10" if dataset == "cifar10" else "the embedded sample of CIFAR-10"


def conditions(results: Sequence[Result]) -> str:
    """Returns one sentence with dates, hardware and versions of the measured results."""
    measured = [result for result in results if result.status == "measured"]
    if not measured:
        return "Nothing was measured."
    days = sorted({result.date[:10] for result in measured})
    places = dict.fromkeys(
        f"{r.hardware['cpu']}, {r.hardware['cores']} cores, on {r.hardware['device']}" for r in measured
    )
    packages = ("python", "jax", "flax", "torch")
    versions = {p: sorted({r.versions[p] for r in measured if p in r.versions}) for p in packages}
    told = ", ".join(f"{package} {' and '.join(found)}" for package, found in versions.items() if found)
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Measured {period} on {'; '.join(places)}; {told}."


def markdown(results: Sequence[Result]) -> str:
    """Returns the tables of all groups, how policies were applied, what was left out, and the conditions."""
    blocks = list[str]()
    for group in groups(results):
        lines = [f"**{caption(group)}**", "", _line(HEADINGS), _line(["---", *["---:"] * (len(HEADINGS) - 1)])]
        lines += [_line([f"`{row[0]}`", *row[1:]]) for row in rows_of(group)]
        if told := [*notes(group), *left_out(group)]:
            lines += ["", *(f"- {sentence}" for sentence in told)]
        blocks.append("\n".join(lines))
    blocks.append(conditions(results))
    return "\n\n".join(blocks)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
