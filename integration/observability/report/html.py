"""A report as one HTML file: nothing is loaded from anywhere, and no script runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_SHADES = ("#eef2f7", "#d6e2f0", "#b7cde6", "#93b4d9", "#6d99ca", "#4b7db9", "#3263a2", "#1f4a85", "#102f5c")
_DARK_SHADES = (
    "#1d232c",
    "#20304a",
    "#234067",
    "#275184",
    "#3065a3",
    "#447cbd",
    "#6697d1",
    "#92b6e2",
    "#c6dbf3",
)
_KINDS = ("#2f6fb7", "#d77b1f", "#3f9b63", "#b03a5b", "#7a5fb0", "#6b7680")

_STYLE = """
:root{color-scheme:light dark;--ink:#1b2430;--soft:#5b6675;--paper:#fbfcfd;--card:#ffffff;--edge:#dde3ea;SHADES}
@media (prefers-color-scheme:dark){
:root{--ink:#e6ebf1;--soft:#9aa6b4;--paper:#12161c;--card:#181d25;--edge:#2b333e;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 2px}h2{font-size:16px;margin:0 0 2px}
p{margin:0 0 10px}.soft,figcaption{color:var(--soft)}figcaption{font-size:13px;margin:0 0 8px}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.numbers div,figure{background:var(--card);border:1px solid var(--edge);border-radius:8px}
.numbers div{padding:12px 14px}.numbers b{display:block;font-size:22px;line-height:1.2}
.numbers span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:16px}
figure{margin:0;padding:14px 16px}.wide{grid-column:1/-1}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:12px}
.grid{stroke:var(--edge);stroke-width:1}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.legend{font-size:13px;color:var(--soft);margin:6px 0 0;display:flex;flex-wrap:wrap;gap:4px 16px;justify-content:center}
.legend span{display:inline-flex;align-items:center;gap:6px}.key{width:12px;height:12px;border-radius:3px}
.scale{align-items:center;gap:0 8px}.scale i{width:20px;height:12px;margin:0 -8px 0 0;display:inline-block}
.scale i:last-of-type{margin:0}
table{border-collapse:collapse;font-size:14px;width:100%}td,th{padding:4px 10px 4px 0;text-align:left;
border-bottom:1px solid var(--edge)}td+td,th+th{text-align:right}
.tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:8px 40px;align-items:start}
@media print{figure,.numbers div{break-inside:avoid}}
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart or a table with what it shows. body: HTML that is safe to put in. wide: takes the whole width."""

    title: str
    caption: str
    body: str
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """numbers: (name, value) of the row at the top."""

    title: str
    subtitle: str
    numbers: Sequence[tuple[str, str]]
    figures: Sequence[Figure]

    def html(self) -> str:
        """The whole file."""
        numbers = "".join(
            f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in self.numbers
        )
        figures = "".join(
            f"<figure{' class=wide' if one.wide else ''}><h2>{escape(one.title)}</h2>"
            f"<figcaption>{escape(one.caption)}</figcaption>{one.body}</figure>"
            for one in self.figures
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_style()}</style></head><body><main>"
            f'<h1>{escape(self.title)}</h1><p class="soft">{escape(self.subtitle)}</p>'
            f'<div class="numbers">{numbers}</div><div class="charts">{figures}</div></main></body></html>\n'
        )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is to the left, the others to the right."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _style() -> str:
    shades = "".join(f"--s{index}:{colour};" for index, colour in enumerate(_SHADES))
    dark = "".join(f"--s{index}:{colour};" for index, colour in enumerate(_DARK_SHADES))
    rules = [
        f"path.s{index}{{fill:var(--s{index})}}i.s{index}{{background:var(--s{index})}}"
        for index in range(len(_SHADES))
    ]
    for index, colour in enumerate(_KINDS):
        rules.append(
            f".line.k{index}{{stroke:{colour}}}.fill.k{index},.dot.k{index}{{fill:{colour}}}"
            f".key.k{index}{{background:{colour}}}"
        )
    return (_STYLE.replace("SHADES", shades).replace("DARK", dark) + "".join(rules)).strip()
