"""Links in every page lead somewhere, and the site takes along the files outside docs/ that its pages link to."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`\(", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_links_out_of_docs_lead_to_copies(site):
    text, files = site.rewritten("see [mask](../../src/rowmax/mask.py), [all](../../tests), [next](index.md)", "lessons/x.md")
    assert text == "see [mask](../source/src/rowmax/mask.py), all (`tests/`), [next](index.md)"
    assert files == {"src/rowmax/mask.py"}
    text, files = site.rewritten("[`mask.py`](../src/rowmax/mask.py#L3) and [far](https://example.org/x)", "map.md")
    assert text == "[`mask.py`](source/src/rowmax/mask.py#L3) and [far](https://example.org/x)"
    with pytest.raises(FileNotFoundError, match=r"docs/map.md links to ../src/none.py"):
        site.rewritten("[none](../src/none.py)", "map.md")


def test_every_page_of_the_site_can_be_rewritten(site):
    outside = set()
    for page in PAGES:
        outside |= site.rewritten(page.read_text(), str(page.relative_to(DOCS)))[1]
    assert "src/rowmax/problem.py" in outside
    assert all((ROOT / path).is_file() for path in outside)


def test_lessons_are_all_listed():
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "lessons" / "index.md").read_text())
    assert set(listed) == {page.name for page in (DOCS / "lessons").glob("*.md")} - {"index.md"}


def test_the_site_is_built(tmp_path, site):
    """Where mkdocs is installed (`pip install -e .[docs]`)."""
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert (tmp_path / "lessons" / "index.html").is_file()
    assert (tmp_path / "source" / "src" / "rowmax" / "mask.py").is_file()
