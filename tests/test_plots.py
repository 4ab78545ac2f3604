"""Pictures are the same bytes everywhere, tell their colours apart, and nothing in them overlaps."""

import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from jaxrec.profiling.regions import OTHER, REGIONS
from jaxrec.reporting import plots

ROOT = Path(__file__).parents[1]
LONG = "a shape whose label is so long that it takes several lines, with a_name_without_any_blank_in_all_of_it"
STACKS = tuple(plots.STACK_COLORS)


def grouped(groups, series, **more):
    return lambda: plots.grouped_bars(groups, series, unit="milliseconds a step", title="A title", **more)


def stacked(bars, parts):
    return lambda: plots.stacked_bars(bars, parts, unit="ms of thread time a step", title=LONG)


def lines(x, series, **more):
    return lambda: plots.points(x, series, x_unit="rows of a batch", unit="NE", title="A title", **more)


SHAPES = {
    "one bar": grouped(["a"], {"jax": [3.0]}),
    "one bar of nothing": grouped(["a"], {"jax": [0.0]}),
    "four stacks": grouped([LONG, "short"], {s: [1.5 + k, 7e-3] for k, s in enumerate(STACKS)}),
    "long label of one bar": grouped([LONG, LONG, "c"], {"jax": [1, 2, 3]}),
    "negative": grouped(["a", "b"], {"jax": [-4.0, 2.0], "pytorch-eager": [-0.1, -3.0]}),
    "none": grouped(["a", "b"], {"jax": [None, 2.0], "pytorch-eager": [None, 123_456.0]}),
    "spreads": grouped(
        ["a", "b"],
        {"jax": [5.0, 2.0], "pytorch-eager": [9.0, 4.0]},
        spreads={"jax": [(-1.0, 12.0), None], "pytorch-eager": [(8.9, 9.1), (3, 40)]},
    ),
    "wide range": grouped(["a", "b", "c"], {"rate": [0.00002, 1_806_491, 3.2e13]}),
    "many series": grouped(["a", "b"], {f"the series number {k} of many": [k, 2 * k] for k in range(12)}),
    "regions": stacked(["jax", LONG], {r: [1 + 0.3 * k, 2 / (k + 1)] for k, r in enumerate((*REGIONS, OTHER))}),
    "narrow parts": stacked(["jax"], {r: [100.0 if r == "clip" else 0.01] for r in REGIONS}),
    "nothing": stacked(["jax", "pytorch-eager"], {"loss": [0.0, 0.0], "clip": [0.0, 0.0]}),
    "lines": lines([1, 2, 3, 4], {"jax": [0.8, 0.79, 0.785, None], "pytorch-eager": [0.81, 0.80, 0.79, 0.78]}),
    "logarithmic": lines([2**k for k in range(4, 24)], {"jax": [1.0 + k for k in range(20)]}, log_x=True),
    "crowded": lines([1000 + k for k in range(50)], {"jax": [1e6 * k for k in range(50)]}),
    "whiskers": lines([1, 10], {"jax": [1.0, 5.0]}, spreads={"jax": [(0.5, 2.0), (-3.0, 6.0)]}),
    "level": lines([1, 2], {"jax": [0.7, 0.7]}),
}


def figure_of(draw, monkeypatch):
    monkeypatch.setattr(plots, "_svg", lambda figure, title: figure)
    return draw()


def boxes(figure):
    """(text, box) of everything that is written in a figure."""
    from matplotlib.text import Text

    renderer = figure.canvas.get_renderer()
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts]


def overlapping(found):
    slack = 0.5  # Half a point: boxes include the room of accents and descenders.
    return [
        (a, b)
        for (a, p), (b, q) in itertools.combinations(found, 2)
        if min(p.x1, q.x1) - max(p.x0, q.x0) > slack and min(p.y1, q.y1) - max(p.y0, q.y0) > slack
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_no_text_overlaps_and_all_are_within(shape, monkeypatch):
    figure = figure_of(SHAPES[shape], monkeypatch)
    found = boxes(figure)
    assert len(found) >= 4
    assert not overlapping(found)
    width, height = figure.bbox.width, figure.bbox.height
    outside = [t for t, b in found if b.x0 < 0 or b.y0 < -0.5 or b.x1 > width or b.y1 > height]
    assert not outside


def test_the_walk_finds_an_overlap(monkeypatch):
    figure = figure_of(SHAPES["negative"], monkeypatch)
    figure.text(0.5, 0.5, "xxxxxxxxxxxxxxxx")
    figure.text(0.5, 0.5, "yyyyyyyyyyyyyyyy")
    assert ("xxxxxxxxxxxxxxxx", "yyyyyyyyyyyyyyyy") in overlapping(boxes(figure))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_svg_is_whole_and_themed(shape):
    svg = SHAPES[shape]()
    root = ET.fromstring(svg)
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg)
    assert references and {a or b for a, b in references} == set(ids)
    assert "prefers-color-scheme:dark" in svg and "currentColor" in svg and plots._INK not in svg
    assert "<text" not in svg and "font" not in svg and "<?xml" not in svg and "<metadata" not in svg
    known = {"none", "currentColor", "#000000", "#ffffff", *plots.OTHER_COLORS, *plots.STACK_COLORS.values()}
    used = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg))
    assert "currentColor" in used and used <= known | set(plots.REGION_COLORS.values())
    assert not re.search(r"\d{4}-\d\d-\d\d", svg)


def test_pictures_in_one_page_share_no_id():
    ids = [set(re.findall(r' id="([^"]+)"', SHAPES[s]())) for s in ("negative", "regions", "lines")]
    assert all(ids) and not set.intersection(*ids) and len(set.union(*ids)) == sum(map(len, ids))


DRAW = """
import hashlib, sys
from test_plots import SHAPES
print(hashlib.sha256("".join(draw() for draw in SHAPES.values()).encode()).hexdigest())
"""


def test_two_processes_draw_the_same_bytes(tmp_path):
    """Also where the user has settings of matplotlib's."""
    (tmp_path / "matplotlibrc").write_text(
        "font.size: 20\nsavefig.facecolor: red\naxes.grid: True\nlines.linewidth: 7\n"
    )
    drawn = []
    for seed, folder in (("1", None), ("2", tmp_path)):
        own = {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([*map(str, (ROOT, ROOT / "tests")), os.environ.get("PYTHONPATH", "")]),
        }
        settings = {} if folder is None else {"MPLCONFIGDIR": str(folder), "MATPLOTLIBRC": str(folder / "matplotlibrc")}
        done = subprocess.run(
            [sys.executable, "-c", DRAW],
            cwd=ROOT,
            env={**os.environ, **own, **settings},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        drawn.append(done.stdout)
    assert drawn[0] == drawn[1] and len(drawn[0]) == 65


def test_a_value_shows():
    assert grouped(["a"], {"jax": [3.0]})() != grouped(["a"], {"jax": [3.1]})()


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHTS = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])


def lab(color, sight):
    """CIELAB of a colour, as it is seen."""
    parts = np.array([int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    t = XYZ @ np.clip(np.array(SIGHTS[sight]) @ linear, 0, 1) / XYZ.sum(1)
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def closest(chosen):
    return min(
        float(np.linalg.norm(lab(a, sight) - lab(b, sight)))
        for sight in SIGHTS
        for a, b in itertools.combinations(chosen, 2)
    )


def test_colors_are_told_apart():
    """A difference of 2.3 is just noticed; red and green of equal lightness, which many do not tell apart, fail."""
    assert closest(plots.STACK_COLORS.values()) > 28
    assert closest(plots.REGION_COLORS.values()) > 17
    assert closest(plots.OTHER_COLORS[:5]) > 17
    assert closest(["#d55e00", "#7a8b00"]) < 17


@pytest.mark.parametrize(
    "color", sorted({*plots.STACK_COLORS.values(), *plots.REGION_COLORS.values(), *plots.OTHER_COLORS})
)
def test_colors_stand_out_from_light_and_dark(color):
    light, dark = 1.0, plots.luminance("#0d1117")
    own = plots.luminance(color)
    assert (light + 0.05) / (own + 0.05) > 1.8 and (own + 0.05) / (dark + 0.05) > 1.8


def test_stacks_and_regions_have_one_color_each():
    assert set(plots.REGION_COLORS) == {*REGIONS, OTHER}
    assert set(STACKS) == {"jax", "pytorch-eager", "pytorch-compiled", "pytorch-fbgemm"}
    for names in (STACKS, (*REGIONS, OTHER)):
        assert len(set(plots.colors(names).values())) == len(names)
    mixed = plots.colors(["something", "jax", "else"])
    assert mixed["jax"] == plots.STACK_COLORS["jax"] and len(set(mixed.values())) == 3
    assert plots.STACK_COLORS["pytorch-fbgemm"] in grouped(["a"], {"pytorch-fbgemm": [1.0]})()


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"), (0.3331, "0.333"), (-0.2, "-0.200"), (7.593, "7.59"), (123.4, "123"), (9876.0, "9,876"),
        (12_345, "12.3 k"), (195_972_925, "196 M"), (3.2e13, "32.0 T"), (0.00002, "2e-05"),
    ],
)  # fmt: skip
def test_numbers_at_the_ends_of_bars(value, text):
    assert plots.number(value) == text


def test_texts_of_ticks():
    assert plots.tick_texts([0, 0.25, 0.5]) == ["0", "0.25", "0.50"]
    assert plots.tick_texts([0, 500_000, 1_000_000]) == ["0", "0.5 M", "1.0 M"]
    assert plots.tick_texts([0, 2_500, 5_000]) == ["0", "2,500", "5,000"]


def test_series_of_other_lengths_and_negative_parts_are_refused():
    with pytest.raises(ValueError, match="jax has 2 values, but there are 1 labels"):
        grouped(["a"], {"jax": [1.0, 2.0]})()
    with pytest.raises(ValueError, match="the spread of jax has 2 values"):
        grouped(["a"], {"jax": [1.0]}, spreads={"jax": [None, None]})()
    with pytest.raises(ValueError, match="negative"):
        stacked(["a"], {"loss": [-1.0]})()
