"""Draws `towers.svg`: the way of an image and its gradient through one step.

    python docs/images/draw_towers.py

Plain SVG text without dependencies. The picture brings its own background, so it is
readable on light and dark pages; where the viewer's system prefers dark, it is dark.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

OUTPUT = Path(__file__).with_name("towers.svg")

WIDTH, HEIGHT = 960, 690
TOWERS = 4
TOWER_WIDTH = 170
TOWER_CENTRES = [205 + 195 * number for number in range(TOWERS)]
# Within a tower: where variables come in, and where gradients leave.
READ_OFFSET, GRADIENT_OFFSET = -45, 45
VARIABLE_LANE = 65  # Left of everything, back up from the variables to the towers.

# Each class of elements, light and dark: fill, stroke.
COLOURS = {
    "page": (("#ffffff", "#d0d7de"), ("#0d1117", "#30363d")),
    "host": (("#f6f8fa", "#afb8c1"), ("#161b22", "#484f58")),
    "data": (("#ddf4ff", "#0969da"), ("#0c2d4d", "#4493f8")),
    "tower": (("#dafbe1", "#1a7f37"), ("#0f3019", "#3fb950")),
    "update": (("#fff8c5", "#9a6700"), ("#352a08", "#d29922")),
    "state": (("#fbefff", "#8250df"), ("#2b1b47", "#ab7df8")),
    "flow": (("none", "#57606a"), ("none", "#8b949e")),
    "read": (("none", "#8250df"), ("none", "#ab7df8")),
    "flow-head": (("#57606a", "none"), ("#8b949e", "none")),
    "read-head": (("#8250df", "none"), ("#ab7df8", "none")),
    "title": (("#1f2328", "none"), ("#f0f6fc", "none")),
    "note": (("#57606a", "none"), ("#9198a1", "none")),
    "read-note": (("#8250df", "none"), ("#c297ff", "none")),
}


def style() -> str:
    """Returns the style sheet, for light and for dark."""

    def rules(theme: int) -> str:
        return " ".join(
            f".{name} {{ fill: {themes[theme][0]}; stroke: {themes[theme][1]}; }}"
            for name, themes in COLOURS.items()
        )

    return (
        "<style>"
        'text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; '
        "text-anchor: middle; } "
        ".title { font-size: 15px; font-weight: 600; } "
        ".note, .read-note { font-size: 12.5px; } "
        ".flow, .read { stroke-width: 1.6; } .read { stroke-dasharray: 6 4; } "
        f"{rules(0)} @media (prefers-color-scheme: dark) {{ {rules(1)} }}</style>"
    )


def rectangle(
    kind: str, left: float, top: float, width: float, height: float, radius: float = 8
) -> str:
    """Returns a rounded rectangle."""
    return (
        f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" '
        f'height="{height}" rx="{radius}"/>'
    )


def text(kind: str, x: float, y: float, content: str, anchor: str = "middle") -> str:
    """Returns one line of text whose baseline is at `y`."""
    style = f' style="text-anchor: {anchor}"' if anchor != "middle" else ""
    return f'<text class="{kind}" x="{x}" y="{y}"{style}>{escape(content)}</text>'


def box(
    kind: str,
    left: float,
    top: float,
    width: float,
    height: float,
    title: str,
    *notes: str,
) -> str:
    """Returns a rectangle with a title and lines below it, centred."""
    line = 19
    first = top + (height - line * len(notes)) / 2 + 5
    lines = [text("title", left + width / 2, first, title)]
    lines += [
        text("note", left + width / 2, first + line * number, note)
        for number, note in enumerate(notes, 1)
    ]
    return "\n".join([rectangle(kind, left, top, width, height), *lines])


def arrow(kind: str, *points: tuple[float, float]) -> str:
    """Returns a line through the points, with a head at the last one."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class="{kind}" points="{path}" marker-end="url(#{kind}-arrow)"/>'


def line(kind: str, *points: tuple[float, float]) -> str:
    """Returns a line through the points."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class="{kind}" points="{path}"/>'


def arrow_heads() -> str:
    """Returns the markers that end arrows."""
    return "".join(
        f'<marker id="{kind}-arrow" viewBox="0 0 10 10" refX="9" refY="5" '
        'markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="{kind}-head" d="M0,0.5 L10,5 L0,9.5 z"/></marker>'
        for kind in ("flow", "read")
    )


def draw_input() -> list[str]:
    """Returns the records, their order, and the batch that is split."""
    middle, bus = 57, 118
    first, last = TOWER_CENTRES[0], TOWER_CENTRES[-1]
    return [
        box("data", 120, 28, 200, 58, "Records on disk", "CIFAR-10, as .bin files"),
        arrow("flow", (320, middle), (388, middle)),
        box("data", 390, 28, 220, 58, "Shuffled order", "a function of seed and epoch"),
        arrow("flow", (610, middle), (678, middle)),
        box("data", 680, 28, 220, 58, "Global batch", "distorted, then split"),
        line("flow", (last, 86), (last, bus)),
        text("note", 120, 110, "one prefetch queue per tower", "start"),
        line("flow", (first, bus), (last, bus)),
    ]


def draw_tower(number: int) -> list[str]:
    """Returns one queue and the tower that it feeds."""
    centre = TOWER_CENTRES[number]
    left = centre - TOWER_WIDTH / 2
    slots = [
        rectangle("data", centre + 28 + 22 * slot, 150, 16, 22, 3) for slot in range(2)
    ]
    return [
        arrow("flow", (centre, 118), (centre, 138)),
        rectangle("host", left, 140, TOWER_WIDTH, 42),
        text("title", centre - 26, 166, f"Queue {number}"),
        *slots,
        arrow("flow", (centre, 182), (centre, 208)),
        box(
            "tower",
            left,
            210,
            TOWER_WIDTH,
            104,
            f"Tower {number}, GPU {number}",
            "the model, forward",
            "loss of its own batch",
            "gradients, backward",
        ),
        arrow(
            "flow",
            (centre + GRADIENT_OFFSET, 314),
            (centre + GRADIENT_OFFSET, 385),
        ),
        arrow(
            "read",
            (centre + READ_OFFSET, 345),
            (centre + READ_OFFSET, 316),
        ),
    ]


def draw_update() -> list[str]:
    """Returns the mean, the update, and the variables that all towers read."""
    bus = 345
    return [
        rectangle("host", 100, 372, 820, 182),
        text("note", 118, 546, "on the CPU", "start"),
        box(
            "update",
            120,
            387,
            780,
            52,
            "Mean of the gradients",
            "the one point where the towers wait for each other",
        ),
        arrow("flow", (760, 439), (760, 466)),
        box(
            "update",
            620,
            468,
            280,
            64,
            "One update",
            "if all losses and gradients are finite",
        ),
        arrow("flow", (620, 500), (492, 500)),
        box(
            "state", 210, 468, 280, 64, "Variables, step + 1", "one copy for all towers"
        ),
        line("read", (210, 500), (VARIABLE_LANE, 500), (VARIABLE_LANE, bus)),
        line(
            "read",
            (VARIABLE_LANE, bus),
            (TOWER_CENTRES[-1] + READ_OFFSET, bus),
        ),
        text("read-note", VARIABLE_LANE - 12, 334, "variables, read", "start"),
        text(
            "note",
            TOWER_CENTRES[-1] + GRADIENT_OFFSET + 10,
            348,
            "gradients",
            "start",
        ),
    ]


def draw_outputs() -> list[str]:
    """Returns the checkpoint and its readers."""
    return [
        arrow("flow", (350, 532), (350, 584)),
        box("state", 210, 586, 280, 72, "Checkpoint", "complete or absent"),
        line("flow", (490, 622), (555, 622)),
        arrow("flow", (555, 622), (555, 600), (618, 600)),
        arrow("flow", (555, 622), (555, 650), (618, 650)),
        box("host", 620, 580, 280, 40, "eval.py: precision @ 1"),
        box("host", 620, 630, 280, 40, "Live copy: predict, serve"),
    ]


def draw() -> str:
    """Returns the picture as SVG."""
    elements = [
        rectangle("page", 0.5, 0.5, WIDTH - 1, HEIGHT - 1, 10),
        *draw_input(),
        *draw_update(),
    ]
    for number in range(TOWERS):
        elements += draw_tower(number)
    elements += draw_outputs()
    root = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">'
    )
    return "\n".join(
        [
            root,
            "<title>One step: queues, towers, the mean on the CPU, one update</title>",
            style(),
            f"<defs>{arrow_heads()}</defs>",
            *elements,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    OUTPUT.write_text(draw(), encoding="utf-8")
    print(f"Wrote {OUTPUT}")
