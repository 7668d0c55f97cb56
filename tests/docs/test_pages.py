"""What the pages show is what the commands print."""

import re
import subprocess
import sys

import pytest
from shown_commands import CONSOLE, GENERATED, ROOT, commands, replayed, run, without_times

PAGES = [ROOT / "README.md"]
BLOCKS = [(page, block) for page in PAGES for block in CONSOLE.findall(page.read_text())]
GENERATED_PARTS = [(page, found) for page in PAGES for found in GENERATED.findall(page.read_text())]


@pytest.mark.parametrize("page, block", BLOCKS, ids=[commands(block)[0][:60] for _, block in BLOCKS])
def test_commands_print_what_is_shown(page, block):
    assert without_times(replayed(block)) == without_times(block)


def test_policy_of_the_readme_is_the_one_in_the_tree():
    [shown] = re.findall(r"```cpp\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown in (ROOT / "core/policies/papers/snapkv.cpp").read_text()


def test_python_of_the_readme_runs():
    """After the replay that the page shows first."""
    [shown] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run(commands(CONSOLE.findall((ROOT / "README.md").read_text())[0])[0])
    printed = subprocess.run([sys.executable, "-c", shown], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "snapkv" in printed and "oracle" in printed


@pytest.mark.parametrize("page, found", GENERATED_PARTS, ids=[found[1] for _, found in GENERATED_PARTS])
def test_generated_parts_are_up_to_date(page, found):
    _, command, shown, _ = found
    assert run(command) == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [target for target in targets if not target.startswith("http") and not (page.parent / target).exists()]
    assert targets and not missing


def test_tables_of_the_format_page_are_those_of_the_schema():
    subprocess.run([sys.executable, ROOT / "traces" / "format_tables.py", "--check"], check=True)
