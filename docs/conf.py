"""The documentation site: `make docs` builds it with Sphinx.

Pages are the Markdown files of this folder. Those of the repository's root, such as
the README, are included by pages here, and links between the files are mended so that
they lead to pages both in a checkout and on the site.
"""

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # To describe the use of a GPU takes none.

from cifar10 import __main__ as program
from cifar10.config import augmentation, fields
from cifar10.config.config import read_recipe
from cifar10.config.options import RESULT, Option, Range, options
from cifar10.process import entry_point

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Sphinx.
project = "cifar10-multi-gpu"
author = "the authors of cifar10-multi-gpu"
release = version = PROJECT["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "images"]
smartquotes_action = "D"  # Dashes, and not quotation marks, which people paste.
default_role = "code"  # A docstring's `name`, as in Markdown.
nitpicky = True
# Types in signatures: those of other projects, whose documentation a build without a
# network cannot ask, and those within the package that are no part of the interface.
nitpick_ignore_regex = [("py:(class|data|obj)", ".*")]
suppress_warnings = ["config.cache"]

# Markdown, with the anchors that GitHub gives to headings.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_inline"]

# Docstrings.
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 72

# The look.
html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

# `make linkcheck`, the one thing here that asks the network.
linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors = False
linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1)"]

# Which page of the site shows a file or folder of the repository.
PAGES = {
    DOCS: "index",
    DOCS / "decisions": "decisions/index",
    ROOT / "README.md": "tutorials/start",
    ROOT / "CHANGELOG.md": "project/changelog",
    ROOT / "CONTRIBUTING.md": "project/contributing",
    ROOT / "SECURITY.md": "project/security",
    ROOT / "examples": "tutorials/python",
    ROOT / "examples/README.md": "tutorials/python",
}
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FLAG = re.compile(r"(?<![`\w-])--[a-z]\w*(?=[^`]*(?:`[^`]*`[^`]*)*$)")
_SOURCE = re.compile(r"https://[^\s,]+[^\s,.]")
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def mended(text, folder, page):
    """Returns the text of a file of `folder` with links as the page has to write them.

    A page of the site becomes a page; a file that is none stays a file, to download;
    of a folder only the name is left.
    """
    here = (DOCS / page).parent

    def mend(match):
        target, anchor = match[1], match[2] or ""
        path = (folder / target).resolve()
        if re.match(r"[a-z]+:", target) or not path.exists():
            return match[0]  # What does not exist, Sphinx reports.
        if path.suffix == ".md" and DOCS not in path.parents and path not in PAGES:
            return f"path:{os.path.relpath(path, here)}"  # To download.
        name = PAGES.get(path)
        return os.path.relpath(f"{DOCS / name}.md" if name else path, here) + anchor

    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(mend, part) for part in parts[::2]]
    return "".join(parts)


def mend_page(_, page, content):
    """Mends the links of a page that Sphinx reads, and writes what is generated."""
    if page in ("reference/flags", "reference/python"):
        entry_point.import_tensorflow()  # Without its messages.
    for mark, write in REFERENCES.items():
        if f"<!-- {mark} -->" in content[0]:
            content[0] = content[0].replace(f"<!-- {mark} -->", write())
    content[0] = mended(content[0], (DOCS / page).parent, page)


def mend_included(app, path, _, content):
    """Mends the links of a file that a page includes."""
    page = app.env.current_document.docname  # MyST gives the last part alone.
    if path.suffix == ".md":
        content[0] = mended(content[0], (DOCS / path).resolve().parent, page)


def mark_code(_, __, ___, ____, _____, lines):
    """Marks as code what a docstring indents after a blank line, and flags."""
    marked, before, is_code, is_example = [], "", False, False
    for line in lines:
        is_example = line.startswith(">>>") or (is_example and bool(line))
        is_indented = line.startswith("    ") and not is_example
        if is_indented and not is_code and not before:
            marked += [".. code-block:: python", ""]
            is_code = True
        is_code = is_code and (is_indented or not line)
        # Of a flag's hyphens Sphinx makes a dash, but for code.
        is_plain = is_code or is_example
        marked.append(line if is_plain else _FLAG.sub(r"`\g<0>`", line))
        before = line
    lines[:] = marked


def flag_reference():
    """Returns the flags of a run, section by section, as Markdown."""
    recipes = sorted((ROOT / "cifar10/config/recipes").glob("*.toml"))
    settings = {path.stem: read_recipe(path.stem) for path in recipes}
    parts = []
    for section in fields.ALL:
        title = section.__doc__.partition("\n")[0].rstrip(".")
        parts.append(f"## {title}\n")
        parts += [described(one, settings) for one in options(section).values()]
        if section is fields.Run:
            parts.append(described(fields.RESUME, {}))
    return "\n".join(parts)


def described(one: Option, recipes):
    """Returns one flag, or one setting of recipes, as Markdown."""
    kinds = [
        kind
        for kind in get_args(one.type) or (one.type,)
        if kind not in (type(None), type)
    ]
    kind = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
    signature = f"--{one.name} {kind.upper()}" if one.in_flags else one.name
    if one.type is bool:
        signature = f"--{one.name}, --no-{one.name}"
    text = one.help[:1].upper() + one.help[1:]
    text = re.sub(r"(?<![`\w])(--[a-z]\w*)", r"`\1`", text).replace("*", r"\*")
    facts = "; ".join([*validity(one), *values(one, recipes), *scopes(one)])
    end = f"\n\n*{facts}*" if facts else ""
    return f":::{{option}} {signature}\n{text}.{end}\n:::\n"


def validity(one):
    """Returns which values are valid."""
    if one.choices:
        yield "one of " + ", ".join(f"`{choice}`" for choice in one.choices)
    for limit in one.limits:
        if isinstance(limit, Range):
            most = f" to {limit.maximum:,.10g}" if limit.maximum < 1e9 else ""
            yield f"from {limit.minimum:g}{most or ' on'}"


def values(one, recipes):
    """Returns the default, and the recipes with another value."""
    if one.default is not None and "default:" not in one.help:
        yield f"default: `{shown(one.default)}`"
    changed = [
        f"{name}: `{shown(recipe[one.name])}`"
        for name, recipe in recipes.items()
        if recipe.get(one.name, one.default) != one.default
    ]
    if changed:
        yield "recipes: " + ", ".join(changed)


def scopes(one):
    """Returns where a value may be given, and when it may change."""
    if not one.in_flags:
        yield "in recipes and in Python only"
    elif not one.in_recipes:
        yield "not in recipes"
    if one.scope is RESULT:
        yield "fixed for a run"


def shown(value):
    """Returns a value as TOML writes it, or what a long one is."""
    if isinstance(value, dict | list):
        return "a table"
    return str(value).lower() if isinstance(value, bool) else str(value)


def augmentation_reference():
    """Returns the entries of a recipe's augmentation table, as Markdown.

    A function's docstring begins with the effect, and links the source.
    """
    from cifar10.input.augmentation import SINGLE, erase, mix

    functions = {"random_erasing": erase, **dict.fromkeys(augmentation.MIXING, mix)}
    functions |= {name: function for name, (_, function) in SINGLE.items()}
    rows = ["| entry | effect | values |", "| --- | --- | --- |"]
    for name, known in augmentation.PARTS.items():
        text = inspect.getdoc(functions[name])
        effect = text.partition("\n\n")[0].replace("\n", " ")
        source = " ".join(f"<{link}>" for link in _SOURCE.findall(text))
        facts = [
            f"`{key}`: {'; '.join([*values(one, {}), *validity(one)])}"
            for key, one in known.items()
        ]
        rows.append(f"| `{name}` | {effect} {source} | {'<br>'.join(facts)} |")
    return "\n".join(rows)


def command_reference():
    """Returns what each command says of itself, as Markdown."""
    parts = []
    for name in program._COMMANDS:  # noqa: SLF001 - their order is that of the help.
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "cifar10", name, "--help"],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        parts.append(f"## {name}\n\n```text\n{done.stdout.strip()}\n```\n")
    return "\n".join(parts)


REFERENCES = {
    "flags": flag_reference,
    "augmentations": augmentation_reference,
    "commands": command_reference,
}


def setup(app):
    """Connects the functions above to Sphinx's events."""
    app.connect("source-read", mend_page)
    app.connect("include-read", mend_included)
    app.connect("autodoc-process-docstring", mark_code, priority=600)  # After napoleon.
