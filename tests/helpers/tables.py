"""Helpers: what the benchmarks' reports need, and what their tables say."""

import textwrap

ABOUT = {
    "date": "2026-11-21T12:00:00+00:00",
    "commit": "abc1234",
    "processor": "A processor",
    "cores": 2,
    "accelerators": [],
    "bfloat16": ["avx512_bf16"],
    "versions": {"tensorflow": "2.21.0", "torch": "not installed"},
}


def cells(text, name):
    """Returns the cells of the table's row with this name."""
    [line] = [line for line in text.splitlines() if f"| {name} | " in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


def write_package(folder, sources):
    """Writes a package of modules by name, and returns its name."""
    folder.mkdir()
    for name, source in {"__init__": "", **sources}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return folder.name


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")
