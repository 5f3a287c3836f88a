# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else: no network, no library. Also well-formed as XML, so that a strict parser can check it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #222; --line: #ccc; --head: #f2f2f2; }
@media (prefers-color-scheme: dark) { :root { --back: #16181c; --ink: #ddd; --line: #444; --head: #23262b; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 76rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .3rem 0; }
th, td { border: 1px solid var(--line); padding: .15rem .5rem; text-align: right; }
td { white-space: pre; }
thead th { background: var(--head); position: sticky; top: 0; }
th:first-child, td:first-child { text-align: left; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\25B2"; } th[aria-sort=descending] button::after { content: " \\25BC"; }
.wide { overflow-x: auto; } .tall { max-height: 40rem; overflow: auto; }
.maps { display: flex; flex-wrap: wrap; gap: 1rem; } .maps svg { max-width: 100%; height: auto; }
"""

# without scripts the headings are plain text and the tables stay in their order
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      const key = row => parseFloat(row.cells[column].textContent);
      const body = table.tBodies[0];
      body.append(...Array.from(body.rows).sort((a, b) => direction * (key(a) - key(b))));
      table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    });
  });
}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return the whole document; ``parts`` are HTML, ``title`` is text."""
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def maps(pictures: Iterable[str]) -> str:
    """Return ``svg`` elements side by side, where there is room."""
    return f'<div class="maps">{"".join(pictures)}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, sortable: bool = False) -> str:
    """Return a table of texts; a sortable one is sorted by the number that a text begins with."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    kind, around = ("sortable", "wide tall") if sortable else ("plain", "wide")
    return (
        f'<div class="{around}" tabindex="0"><table class="{kind}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )
