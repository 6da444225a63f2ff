"""Draw notebooks/pictures/three_ways*.svg: the three ways to split the work of training.

python notebooks/walkthrough/draw_three_ways.py
"""

from __future__ import annotations

import pathlib

PICTURES = pathlib.Path(__file__).resolve().parents[1] / "pictures"
BLUE, ORANGE, GREY = "#3b7dd8", "#c8641b", "#767c85"
FONT = "font-family='sans-serif' font-size='13'"
WORDS = {
    "three_ways.svg": ("by layers", "within layers", "by samples", "batch", "device 0", "device 1"),
    "three_ways.zh-CN.svg": ("按层拆分", "层内拆分", "按样本拆分", "批量", "设备 0", "设备 1"),
}
NUM_LAYERS, WIDTH, PANEL = 4, 96, 215


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle."""
    return (
        f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='3' "
        f"fill='{colour}' fill-opacity='0.8'/>"
    )


def label(x: float, y: float, words: str, anchor: str = "middle") -> str:
    """A line of text."""
    return f"<text x='{x:g}' y='{y:g}' {FONT} text-anchor='{anchor}' fill='{GREY}'>{words}</text>"


def arrow(x: float, y: float, to_x: float, to_y: float, ends: int = 1) -> str:
    """An arrow; with two ``ends``, one that points both ways."""
    start = "marker-start='url(#head)' " if ends == 2 else ""
    return (
        f"<line x1='{x:g}' y1='{y:g}' x2='{to_x:g}' y2='{to_y:g}' stroke='{GREY}' "
        f"stroke-width='1.5' {start}marker-end='url(#head)'/>"
    )


def stack(x: float, width: float, colours: list[str]) -> list[str]:
    """Layers on top of each other, the first at the bottom."""
    return [box(x, 150 - 32 * i, width, 22, colour) for i, colour in enumerate(colours)]


def batch(x: float, width: float, colour: str) -> str:
    """The samples, below the layers."""
    return box(x, 198, width, 16, colour)


def picture(words: tuple[str, ...]) -> str:
    """The whole drawing as SVG."""
    by_layers, within, by_samples, samples, *devices = words
    half, left = WIDTH / 2 - 3, [PANEL * i + 90 for i in range(3)]
    shapes = [label(x + WIDTH / 2, 26, name) for x, name in zip(left, words)]
    shapes += stack(left[0], WIDTH, [BLUE, BLUE, ORANGE, ORANGE])
    shapes += [
        batch(left[0], WIDTH, GREY),
        arrow(left[0] + WIDTH / 2, 118, left[0] + WIDTH / 2, 110),
    ]
    shapes += [batch(left[1], WIDTH, GREY)]
    for i, colour in enumerate((BLUE, ORANGE)):
        x = half + 6
        shapes += stack(left[1] + x * i, half, [colour] * NUM_LAYERS)
        shapes += stack(left[2] - 10 + (x + 20) * i, half, [colour] * NUM_LAYERS)
        shapes += [batch(left[2] - 10 + (x + 20) * i, half, colour)]
    middle = left[1] + WIDTH / 2
    shapes += [arrow(middle - 9, 145 - 32 * i, middle + 9, 145 - 32 * i, 2) for i in range(3)]
    middle = left[2] + WIDTH / 2
    shapes += [arrow(middle - 10, 107, middle + 10, 107, 2)]
    shapes += [label(78, 211, samples, "end")]
    for i, (name, colour) in enumerate(zip(devices, (BLUE, ORANGE))):
        shapes += [
            box(250 + 130 * i, 234, 12, 12, colour),
            label(268 + 130 * i, 245, name, "start"),
        ]
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {3 * PANEL + 30} 260' "
            "width='660'>",
            f"<title>{by_layers}, {within}, {by_samples}</title>",
            "<defs><marker id='head' viewBox='0 0 6 6' refX='5' refY='3' markerWidth='6' "
            f"markerHeight='6' orient='auto-start-reverse'><path d='M0 0L6 3L0 6z' fill='{GREY}'/>"
            "</marker></defs>",
            *shapes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, words in WORDS.items():
        (PICTURES / name).write_text(picture(words), encoding="utf-8")
