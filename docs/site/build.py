"""Builds the documentation site with MkDocs: stages the pages, generates the reference, checks the links.

python docs/site/build.py [SITE]          builds into SITE (default: out/site)
python docs/site/build.py --check SITE    checks the links of a built site
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import reference

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("mkdocs.yml")
FOREIGN_WORKER = "https://unpkg.com/iframe-worker/shim"  # Material's offline plugin loads it in every page
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def linked_files(page: Path) -> Iterator[Path]:
    """Files of the repository to which a page links."""
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if not urlsplit(target).scheme:
            yield (page.parent / target).resolve()


def stage(folder: Path) -> None:
    """Copies the pages of the navigation, and every file that they link to, at their paths in the repository."""
    pages = re.findall(r"\b[\w./-]+\.md$", CONFIG.read_text(), re.MULTILINE)
    waiting = [ROOT / page for page in pages if not page.startswith("reference/")]
    waiting += [CONFIG.with_name("site.css"), CONFIG.with_name("favicon.svg"), CONFIG.with_name("worker.js")]
    staged = set()
    while waiting:
        source = waiting.pop()
        if source in staged:
            continue
        staged.add(source)
        if not source.is_relative_to(ROOT) or not source.is_file():
            continue  # MkDocs reports the link, with its page
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, target)
        else:
            target.write_text(with_links_to_pages(source))
            for linked in linked_files(source):
                waiting += write_listing(linked, folder) if linked.is_dir() else [linked]


def with_links_to_pages(page: Path) -> str:
    """The text of a page, with a link to the page of a folder for each link to the folder."""

    def replaced(link: re.Match) -> str:
        is_folder = not urlsplit(link[1]).scheme and (page.parent / link[1]).is_dir()
        return link[0].replace(link[1], f"{link[1].rstrip('/')}/README.md") if is_folder else link[0]

    return LINK.sub(replaced, page.read_text())


def write_listing(linked: Path, folder: Path) -> list[Path]:
    """Writes the page of a folder that has none, and returns the files that it links to."""
    if (linked / "README.md").is_file() or not linked.is_relative_to(ROOT):
        return [linked / "README.md"]
    files = sorted(file for file in linked.iterdir() if file.is_file())
    page = folder / linked.relative_to(ROOT) / "README.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# {linked.relative_to(ROOT)}", "", *(f"- [{file.name}]({file.name})" for file in files)]
    page.write_text("\n".join(lines) + "\n")
    return files


def build(site: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        stage(source)
        reference.write(source / "reference")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--config-file", CONFIG]
        environment = {**os.environ, "KVREPLAY_SITE_SOURCE": str(source), "KVREPLAY_SITE": str(site.resolve())}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"docs: mkdocs failed\n{done.stdout}")
    for path in site.rglob("*.html"):
        worker = os.path.relpath(site / "docs" / "site" / "worker.js", path.parent)
        path.write_text(path.read_text().replace(FOREIGN_WORKER, worker))


class Page(HTMLParser):
    """The links, the loaded resources and the anchors of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.resources.append(values["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in values:
            self.resources.append(values["src"])


@cache
def read_page(path: Path) -> Page:
    return Page(path.read_text())


def broken_links(site: Path) -> list[str]:
    """Links to missing files or anchors, and resources that a page loads from another host."""
    problems = []
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # its links are absolute, for a server
            continue
        page = read_page(path)
        name = path.relative_to(site)
        problems += [f"{name}: loads {link} from another host" for link in page.resources if urlsplit(link).netloc]
        for link in page.links + page.resources:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                problems.append(f"{name}: {link}: no such file")
            elif target.suffix == ".html" and parts.fragment:
                anchor = unquote(parts.fragment)
                if anchor != "__skip" and anchor not in read_page(target).anchors:
                    problems.append(f"{name}: {link}: no such anchor")
    return problems


def main(words: list[str]) -> int:
    only_check = words[:1] == ["--check"]
    words = words[1:] if only_check else words
    site = Path(words[0]) if words else ROOT / "out" / "site"
    if not only_check:
        build(site)
    problems = broken_links(site)
    for problem in problems:
        print(f"docs: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
