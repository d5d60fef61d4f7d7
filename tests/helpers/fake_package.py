"""Helpers: packages of modules that stand for rivals, and facts for the reports."""

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


def write(folder, sources):
    """Writes a package of modules by name, and returns its name."""
    folder.mkdir()
    for name, source in {"__init__": "", **sources}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return folder.name
