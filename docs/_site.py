"""Hooks of `make site` (mkdocs.yml): pages link to sources and results, which lie outside docs/ and become part of the site.

A link to a file, `](../src/rowmax/mask.py)`, leads to a copy under `source/`; one to a folder becomes its name. Lessons come in
the order of lessons/index.md.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)((?:#[^)]*)?)\)")
PLACE = "source"


def copy_of(path: str) -> str:
    """Where a file lies in the site; Markdown as it is, so that it becomes no page of its own."""
    return f"{PLACE}/{path}" + ".txt" * path.endswith(".md")


def rewritten(text: str, page: str) -> tuple[str, set[str]]:
    """Markdown of the page `lessons/x.md` with links that stay in the site, and the files that it links to outside docs/.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """
    files = set()
    folder = posixpath.dirname(page)

    def new(match: re.Match) -> str:
        said, target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"docs/{page} links to {target}, and there is no {path}")
        if path.startswith("docs/"):
            return match[0]
        if (ROOT / path).is_dir():
            return said if said.startswith("`") else f"{said} (`{path}/`)"
        files.add(path)
        return f"[{said}]({posixpath.relpath(copy_of(path), folder or '.')}{anchor})"

    return LINK.sub(new, text), files


def on_files(files, config):
    from mkdocs.structure.files import File

    wanted: set[str] = set()
    for page in files.documentation_pages():
        wanted |= rewritten(page.content_string, page.src_uri)[1]
    for path in sorted(wanted):
        files.append(File.generated(config, copy_of(path), content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    return rewritten(markdown, page.file.src_uri)[0]


def on_nav(nav, config, files):
    """Lessons in the order in which their first page lists them."""
    order = [name for _, name, _ in LINK.findall((ROOT / "docs" / "lessons" / "index.md").read_text())]
    for section in nav.items:
        if section.is_section and all(page.is_page and page.file.src_uri.startswith("lessons/") for page in section.children):
            section.children.sort(key=lambda page: _place(posixpath.basename(page.file.src_uri), order))
    return nav


def _place(name: str, order: list[str]) -> int:
    return order.index(name) if name in order else -1
