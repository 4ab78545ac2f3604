"""A report as one page of HTML that needs nothing else: no network, no scripts, no other files.

It is rendered from the report's own Markdown, so that both say the same. Pictures are within the page; colours follow
the reader's preference for light or dark.
"""

from __future__ import annotations

import base64
import dataclasses
import html as html_lib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jaxrec.checks import import_package
from jaxrec.reporting.plots import INK_DARK, INK_LIGHT

_IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".svg": "image/svg+xml"}
# How a cell begins that may stand in a column of numbers, or all of it: 1,234.5 (1 to 2), +0.01, -, nothing.
_NUMBER = re.compile(r"[-+\u2212]?\.?\d|[-\u2013]?$|n/a$")
# A link to another report leads from page to page.
_REPORT = re.compile(r"^(?![a-z]+:)((?:.*/)?report)\.md(?=$|#)")

_STYLE = f"""
:root {{ color-scheme: light dark; --ink: {INK_LIGHT}; --ground: #ffffff; --quiet: #59636e; --line: #d1d9e0;
  --shade: #f6f8fa; --link: #0969da; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: {INK_DARK}; --ground: #0d1117; --quiet: #9198a1; --line: #3d444d; --shade: #151b23;
    --link: #4493f8; }}
}}
body {{ margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 70rem; color: var(--ink); background: var(--ground);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
h1, h2, h3 {{ line-height: 1.25; margin: 2em 0 0.6em; }}
h1 {{ font-size: 1.75rem; margin-top: 0; }}
h2 {{ font-size: 1.3rem; padding-bottom: 0.25em; border-bottom: 1px solid var(--line); }}
h3 {{ font-size: 1.08rem; }}
p, li {{ max-width: 46rem; }}
a {{ color: var(--link); }}
code {{ font: 0.875em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--shade);
  padding: 0.15em 0.35em; border-radius: 4px; }}
pre {{ background: var(--shade); padding: 0.8em 1em; border-radius: 6px; overflow-x: auto; }}
pre code {{ background: none; padding: 0; }}
.wide {{ overflow-x: auto; margin: 1.2em 0; }}
table {{ border-collapse: collapse; font-size: 0.9rem; line-height: 1.4; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.4em 0.8em; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }}
th {{ vertical-align: bottom; border-bottom: 2px solid var(--line); }}
.number {{ text-align: right; }}
td.number {{ white-space: nowrap; }}
figure {{ margin: 1.5em 0; overflow-x: auto; }}
figure svg, figure img {{ display: block; max-width: 100%; height: auto; }}
blockquote {{ margin: 1em 0; padding-left: 1em; border-left: 3px solid var(--line); color: var(--quiet); }}
@media print {{ body {{ max-width: none; padding: 0; }} }}
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A study in the index of reports.

    Attributes:
      study: Its folder.
      question: What it asks.
      finding: What it found, in a sentence with its numbers.
    """

    study: str
    question: str
    finding: str


def html(markdown: str, figures: Mapping[str, str], title: str, folder: Path | None = None) -> str:
    """Returns the page.

    Args:
      markdown: The report, GitHub's Markdown with tables; HTML in it is shown as text.
      figures: File name -> SVG of the pictures that the report shows.
      title: Of the page.
      folder: Where the other images that it shows are.

    Raises:
      UserError: markdown-it-py is not installed.
      ValueError: The report shows an image that is neither among the figures nor in the folder.
    """
    package = import_package("markdown_it", "pages need the package markdown-it-py", "'jaxrec[report]'")
    parser = package.MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])

    def image(_: Any, tokens: Sequence[Any], k: int, *__: Any) -> str:
        name, alt = unquote(tokens[k].attrs["src"]), html_lib.escape(tokens[k].content)
        if name in figures:
            return figures[name].strip().replace(' role="img"', f' role="img" aria-label="{alt}"', 1)
        return f'<img src="{_data(name, folder)}" alt="{alt}">'

    parser.add_render_rule("image", image)
    parser.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.parse(markdown)
    _align_numbers(tokens)
    for k, token in enumerate(tokens):
        children = token.children or []
        for link in children:
            if link.type == "link_open":
                link.attrs["href"] = _REPORT.sub(r"\1.html", link.attrs["href"])
        if [c.type for c in children] == ["image"]:  # It stands alone: a figure, not a paragraph.
            tokens[k - 1].tag = tokens[k + 1].tag = "figure"
    body = parser.renderer.render(tokens, parser.options, {})
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html_lib.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def index(entries: Sequence[Entry]) -> str:
    """Returns `reports/index.html`: the studies, each with its question, its finding and a link to its page."""
    rows = [f"| [{e.study}]({e.study}/report.html) | {e.question} | {e.finding} |" for e in entries]
    return html(
        "\n".join(["# Reports", "", "| study | question | finding |", "|---|---|---|", *rows]), {}, "jaxrec: reports"
    )


def _data(name: str, folder: Path | None) -> str:
    """Returns an image file as a URI that holds it."""
    path = folder / name if folder is not None and ":" not in name else None
    if path is None or path.suffix not in _IMAGES or not path.is_file():
        raise ValueError(f"the report shows {name!r}, which is neither among its figures nor an image file beside it")
    return f"data:{_IMAGES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _align_numbers(tokens: Sequence[Any]) -> None:
    """Gives the cells of a table's columns of numbers the class `number`; the first column holds labels."""
    columns: list[list[Any]] = []
    column = 0
    for k, token in enumerate(tokens):
        if token.type == "table_open":
            columns = []
        elif token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open"):
            if column == len(columns):
                columns.append([])
            columns[column].append((token, tokens[k + 1].content.strip("*` ")))
            column += 1
        elif token.type == "table_close":
            for cells in columns[1:]:
                texts = [text for cell, text in cells if cell.type == "td_open"]
                if any(texts) and all(_NUMBER.match(text) for text in texts):
                    for cell, _ in cells:
                        cell.attrSet("class", "number")
