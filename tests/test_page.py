"""A page holds all that its report says, and needs nothing else."""

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxrec.checks import UserError
from jaxrec.reporting import page, plots

ROOT = Path(__file__).parents[1]
REPORTS = sorted(ROOT.glob("reports/*/report.html"))
PAGES = [*REPORTS, ROOT / "reports" / "index.html"]
VOID = {"meta", "img", "br", "hr", "link", "input"}
LOADS = {"src", "srcset", "poster", "data", "xlink:href", "background", "action"}


class Reader(HTMLParser):
    """Collects the cells of tables and what the page would load; refuses tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells, self.loads, self.links, self.tags, self.ids = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in LOADS or (name == "href" and tag != "a"):
                self.loads.append(value)
            elif name == "href":
                self.links.append(value)
            assert not name.startswith("on")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def cells_of(markdown):
    """The cells of a report's tables, without the marks of Markdown."""
    rows = [line for line in markdown.splitlines() if line.startswith("|") and not line.startswith("|---")]
    cells = [cell.strip() for row in rows for cell in row.strip().strip("|").split("|")]
    return [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("*", "").replace("`", "") for cell in cells]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.parent.name)
def test_a_page_is_whole_and_loads_nothing(path):
    text = path.read_text()
    found = Reader(text)
    assert found.tags.count("h1") == 1 and "script" not in found.tags
    assert all(load.startswith(("data:", "#")) for load in found.loads)
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith("http") or (path.parent / link).exists() for link in found.links)
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.parent.name)
def test_a_page_has_every_cell_of_its_report(path):
    cells = cells_of((path.parent / "report.md").read_text())
    assert cells
    assert Reader(path.read_text()).cells == cells


def test_pictures_are_within_and_stand_alone():
    svgs = {f"{k}.svg": plots.grouped_bars(["a"], {"jax": [k]}, unit="ms", title=f"T{k}") for k in (1, 2)}
    found = page.html("# T\n\n![first & foremost](1.svg)\n\n![x](2.svg)\n", svgs, "T")
    assert found.count("<figure><svg") == 2 and "<p>" not in found
    assert 'aria-label="first &amp; foremost"' in found
    ids = Reader(found).ids
    assert ids and len(ids) == len(set(ids))


def test_an_image_beside_the_report_is_within(tmp_path):
    png = b"\x89PNG..."
    (tmp_path / "a b.png").write_bytes(png)
    found = page.html("![alt](a%20b.png)", {}, "T", tmp_path)
    assert f"data:image/png;base64,{base64.b64encode(png).decode()}" in found


@pytest.mark.parametrize("name", ["absent.png", "https://example.org/a.png", "a.txt"])
def test_an_image_that_is_not_there_is_refused(name, tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="neither among its figures nor an image file"):
        page.html(f"![alt]({name})", {}, "T", tmp_path)


def test_columns_of_numbers_are_aligned_right():
    markdown = "| name | ms | note |\n|---|---|---|\n| 8 H100 | 1.25 (1 to 2) | 3 of them |\n| b | - | none |\n"
    found = page.html(markdown, {}, "T")
    assert found.count('class="number"') == 3
    assert '<td class="number">1.25 (1 to 2)</td>' in found and "<td>8 H100</td>" in found


def test_links_between_reports_lead_to_pages():
    found = Reader(page.html("[a](../b/report.md) [c](https://x.org/report.md) [d](d.md)", {}, "T"))
    assert found.links == ["../b/report.html", "https://x.org/report.md", "d.md"]


def test_html_of_a_report_is_shown_as_text():
    found = page.html("a <script>alert(1)</script> & b", {}, "a < b")
    assert "<script" not in found and "&lt;script&gt;" in found and "<title>a &lt; b</title>" in found


@pytest.mark.parametrize("package", ["markdown_it", "matplotlib"])
def test_what_is_not_installed_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install 'jaxrec\[report\]'"):
        plots.grouped_bars(["a"], {"jax": [1]}, unit="ms", title="T")
        page.html("# T", {}, "T")
