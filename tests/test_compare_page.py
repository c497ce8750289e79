"""The page: it stands alone, shows text as text, and its tables sort in a browser."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from experiments.compare_html import page
from experiments.compare_records import Cell, Kept, Result

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<script>alert('x')</script>&\"`"
PLACE = {"cpu": EVIL, "cores": 2, "device": EVIL}


def results() -> list[Result]:
    found = []
    for policy, size, seconds in (("everything", 9 * 2**20, 0.009), ("dots", 10 * 2**20, 0.1), (EVIL, 2**20, 0.02)):
        for framework in ("jax", "torch"):
            kept = (
                Kept(f"block1/{EVIL}", "conv", "float32", "traced", 1, size),
                Kept("", "mean", EVIL, "saved", 2, 64),
            )
            cell = Cell(framework, "net", policy, 4, "sample", 5, 0)
            found.append(
                Result(
                    cell,
                    "measured",
                    kept=kept,
                    recomputed={"conv": 1},
                    peak_bytes=size,
                    step_seconds=(seconds,),
                    losses=(1.0,),
                    test_accuracy=0.5,
                    date="2026-01-02",
                    hardware=PLACE,
                    versions={"jax": EVIL},
                )
            )
    failed = Cell("torch", "net", "nothing", 4, "sample", 5, 0)
    return [*found, Result(failed, "failed", why=EVIL)]


class Outline(HTMLParser):
    """The tags of a page, and whether each is closed."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_text_as_text():
    text = page(results(), [(EVIL, 2**20, 2**19)])
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert outline.seen.count("script") == 1
    assert outline.seen.count("svg") == 2
    assert all(address.startswith("#") for address in outline.addresses)
    assert "<script>alert" not in text
    assert not re.search(r"@import|url\((?!#)", text)
    assert text == page(results(), [(EVIL, 2**20, 2**19)])


def test_a_page_of_nothing_is_a_page():
    outline = Outline()
    outline.feed(page([]))
    assert outline.open == []


def test_stored_sets_of_both_frameworks_are_compared():
    one, other, *rest = results()
    other = replace(other, kept=(Kept("block1", "relu", "float32", "region input", 1, 128),))
    assert "the input of a checkpointed block" in page([one, other, *rest])


PROBE = """
<script>
const table = document.querySelector("table"), said = [];
const column = i => [...table.tBodies[0].rows].map(row => row.cells[i].textContent).join(";");
for (const i of [1, 1, 0, 5]) { table.tHead.rows[0].cells[i].querySelector("button").click(); said.push(column(i === 0 ? 0 : 1)); }
document.body.dataset.said = JSON.stringify(said);
document.body.dataset.sorted = [...document.querySelectorAll("th[aria-sort]")].length;
document.body.dataset.errors = window.errors.join();
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_tables_sort_in_a_browser_without_an_error(tmp_path):
    text = page([r for r in results() if "<" not in r.cell.policy])
    watch = "<head><script>window.errors = []; window.onerror = message => { window.errors.push(message); };</script>"
    text = text.replace("<head>", watch, 1)
    start, _, end = text.rpartition("</body>")
    (tmp_path / "page.html").write_text(start + PROBE + end)
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--user-data-dir={tmp_path}",
    ]
    done = subprocess.run([*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120)
    said = re.search(r'data-said="([^"]*)"', done.stdout)
    assert said is not None, done.stderr
    # Up, down by the kept bytes; by name; by time: `everything` 9 ms before `dots` 100 ms.
    assert said.group(1).replace("&quot;", '"') == (
        '["9.0;10.0;n/a","10.0;9.0;n/a","dots;everything;nothing","9.0;10.0;n/a"]'
    )
    assert 'data-sorted="1"' in done.stdout
    assert 'data-errors=""' in done.stdout
