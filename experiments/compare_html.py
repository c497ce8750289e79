"""The comparison as one HTML page that needs nothing else: tables that sort, pictures, and the stored sets layer by layer."""

from collections.abc import Sequence
from html import escape
from string import Template

from experiments.compare_claims import HOW_TAKEN, POLICIES, Finding, findings
from experiments.compare_diff import UNEXPLAINED, diff
from experiments.compare_plots import kept_by_layer, memory_against_time
from experiments.compare_records import Kept, Result
from experiments.compare_table import HEADINGS, Group, caption, conditions, groups, left_out, mib, notes, rows_of

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rematerialization in JAX and PyTorch</title>
<style>
:root { color-scheme: light; --ink: #1d2329; --faint: #5c6670; --line: #d8dde2; --shade: #f4f6f8; --accent: #0b5cad; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 86rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
p.note, figcaption, caption { color: var(--faint); text-align: left; }
nav a { margin-right: 1rem; color: var(--accent); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .75rem 0; font-size: .88rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td:first-child, td:not(.text) { white-space: nowrap; } thead th { background: var(--shade); vertical-align: bottom; }
thead button { all: unset; cursor: pointer; font-weight: 600; } thead button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " \\25B2"; } th[aria-sort=descending] button::after { content: " \\25BC"; }
tr.same { color: var(--faint); } figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
details { margin: .4rem 0; } summary { cursor: pointer; } code { background: var(--shade); padding: 0 .2em; }
</style>
</head>
<body>
<h1>Rematerialization in JAX and PyTorch</h1>
<p class="note">$conditions</p>
<nav>$links<a href="#claims">Claims</a><a href="#how">How each figure was taken</a></nav>
<p>The same networks with the same initial weights on the same batches, under the same policies: what a step of training stores for
its backward pass, and what it computes again instead. “Kept” is what lives from the forward to the backward pass; “peak” is the
most that a step takes above parameters, optimizer state and batch; “n/a” stands where a framework has no figure, with the reason
below the table. Click a heading to sort.</p>
<details><summary>What the policies store</summary>$policies</details>
$groups
<h2 id="claims">What is said, and what was measured</h2>
$claims
$relu
<h2 id="how">How each figure was taken</h2>
$how
<script>
for (const button of document.querySelectorAll("thead button")) button.addEventListener("click", () => {
  const th = button.closest("th"), body = th.closest("table").tBodies[0];
  const up = th.getAttribute("aria-sort") !== "ascending";
  for (const other of th.parentNode.children) other.removeAttribute("aria-sort");
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[th.cellIndex].textContent.trim();
  const order = (a, b) => {
    const [x, y] = [parseFloat(key(a)), parseFloat(key(b))];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || key(a).localeCompare(key(b));
    return (up ? 1 : -1) * (x - y);
  };
  const text = (a, b) => (up ? 1 : -1) * key(a).localeCompare(key(b));
  body.append(...[...body.rows].sort(th.classList.contains("text") ? text : order));
});
</script>
</body>
</html>
""")


def page(results: Sequence[Result], relu: Sequence[tuple[str, int, int]] = ()) -> str:
    """Returns the page. Every text from the records is escaped.

    Args:
        results: of the comparison.
        relu: rows of model, bytes kept with PyTorch's own ReLU, bytes kept with bit masks.
    """
    all_groups = groups(results)
    return PAGE.substitute(
        conditions=escape(conditions(results)),
        links="".join(f'<a href="#{_anchor(group)}">{escape(group.model)}</a>' for group in all_groups),
        groups="\n".join(map(_group, all_groups)),
        policies=_terms(POLICIES),
        claims=_claims(findings(results)),
        relu=_relu(relu),
        how=_terms(HOW_TAKEN),
    )


def _terms(explained: Sequence[tuple[str, str]]) -> str:
    return (
        "<dl>" + "".join(f"<dt><b>{_code(name)}</b></dt><dd>{_code(text)}</dd>" for name, text in explained) + "</dl>"
    )


def _group(group: Group) -> str:
    body = [[f"<code>{escape(row[0])}</code>", *map(escape, row[1:])] for row in rows_of(group)]
    differences = [text for policy in group.policies if (text := _difference(group, policy))]
    parts = [
        f'<h2 id="{_anchor(group)}">{escape(group.model)}</h2>',
        _table(HEADINGS, body, caption(group), text=(0,)),
        _list("How the policies were applied:", notes(group)),
        _list("Left out of the table:", left_out(group)),
        _figure(memory_against_time(group), "Peak memory of a step against its time, by policy."),
        _figure(kept_by_layer(group), "What each part of the network keeps for the backward pass, by policy."),
        "<h3>The stored sets, layer by layer</h3>",
        *(differences or ["<p>There is no policy here that both frameworks have figures for.</p>"]),
    ]
    return "\n".join(part for part in parts if part)


def _list(title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{_code(sentence)}</li>" for sentence in sentences)
    return f"<p>{title}</p><ul>{items}</ul>" if items else ""


def _difference(group: Group, policy: str) -> str:
    jax, torch = group.find("jax", policy), group.find("torch", policy)
    if jax is None or torch is None or jax.status != "measured" or torch.status != "measured":
        return ""
    rows = diff(jax, torch)
    equal = sum(row.jax.size_bytes for row in rows if row.equal and row.jax)
    body = [
        [escape(row.layer or "(loss and pooling)"), escape(_value(row.jax)), _size(row.jax), escape(_value(row.torch)), _size(row.torch), escape(row.why)]
        for row in rows
    ]  # fmt: skip
    classes = ["same" if row.equal else "" for row in rows]
    headings = ("layer", "JAX keeps", "bytes", "PyTorch keeps", "bytes", "why they differ")
    open_rows = sum(row.why == UNEXPLAINED for row in rows)
    told = (
        f"JAX {jax.kept_bytes:,} bytes, PyTorch {torch.kept_bytes:,} bytes; {equal:,} bytes are the same values, "
        f"the rest is in {sum(not row.equal for row in rows) - open_rows} rows with a reason"
        + (f" and in {open_rows} that nobody has explained" if open_rows else "")
    )
    table = _table(headings, body, "", text=(0, 1, 3, 5), classes=classes)
    return f"<details><summary><code>{escape(policy)}</code>: {told}</summary>{table}</details>"


def _value(kept: Kept | None) -> str:
    if kept is None:
        return ""
    how = "" if kept.how in ("traced", "saved") else f", {kept.how}"
    return f"{kept.count} x {kept.op.strip('_')} {kept.dtype}{how}"


def _size(kept: Kept | None) -> str:
    return "" if kept is None else str(kept.size_bytes)


def _claims(found: Sequence[Finding]) -> str:
    body = [[escape(finding.claim), escape(finding.where), escape(finding.measured)] for finding in found]
    return _table(("claim", "model and framework", "measured"), body, "", text=(0, 1, 2))


def _relu(rows: Sequence[tuple[str, int, int]]) -> str:
    if not rows:
        return ""
    body = [[escape(model), mib(native), mib(mask), f"{mask / native - 1:+.2%}"] for model, native, mask in rows]
    headings = ("model", "kept with F.relu, MiB", "kept with a bit mask, MiB", "difference")
    told = (
        "A ReLU that keeps one bit an element (PyTorch, no policy): it saves only where nothing else keeps ReLU's output, "
        "before the last mean."
    )
    return "<h3>SelectiveReLU against F.relu</h3>" + _table(headings, body, told, text=(0,))


def _table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str,
    *,
    text: Sequence[int],
    classes: Sequence[str] | None = None,
) -> str:
    """Returns a table of cells that are escaped already; columns in `text` are words."""
    head = "".join(
        f'<th scope="col"{" class=text" if i in text else ""}><button>{escape(heading)}</button></th>'
        for i, heading in enumerate(headings)
    )
    body = "\n".join(
        f"<tr{f' class={css}' if css else ''}>"
        + "".join(f"<td{' class=text' if i in text else ''}>{cell}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row, css in zip(rows, classes or [""] * len(rows))
    )
    told = f"<caption>{escape(title)}</caption>" if title else ""
    return f'<div class="wide"><table>{told}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _figure(svg: str, told: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(told)}</figcaption></figure>"


def _code(text: str) -> str:
    """Returns text with its `code` in backquotes marked up."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def _anchor(group: Group) -> str:
    return escape(f"{group.model}-{group.batch_size}-{group.dataset}-{group.steps}")
