"""Pages show the output of their commands, the code of the tree, and links that exist."""

import json
import re
import subprocess
import sys

import h5py
import pytest
from shown_commands import CODE, CONSOLE, GENERATED, ROOT, code_of_the_tree, commands, replayed, run, without_times

README = ROOT / "README.md"
WRITING_POLICIES = ROOT / "docs" / "writing-policies.md"
README_LINES = 150
DOCS = [
    "docs/policies.md",
    "docs/budgets.md",
    "docs/compare.md",
    "docs/experiments.md",
    "docs/cluster.md",
    "docs/report.md",
    "docs/python.md",
    "docs/questions.md",
    "docs/regret.md",
    "docs/sampling.md",
    "docs/writing-policies.md",
    "core/policies/README.md",
    "traces/FORMAT.md",
]
PAGES = [README, *(ROOT / page for page in DOCS)]
SHOWN_CODE = [(page, found) for page in PAGES for found in CODE.findall(page.read_text())]
BLOCKS = [(page, block) for page in PAGES for block in CONSOLE.findall(page.read_text())]
GENERATED_PARTS = [(page, found) for page in PAGES for found in GENERATED.findall(page.read_text())]


@pytest.mark.parametrize("page, block", BLOCKS, ids=[commands(block)[0][:60] for _, block in BLOCKS])
def test_commands_print_what_is_shown(page, block):
    assert without_times(replayed(block)) == without_times(block)


@pytest.mark.parametrize("page, found", SHOWN_CODE, ids=[found[1] for _, found in SHOWN_CODE])
def test_shown_code_is_that_of_the_tree(page, found):
    code, struct = found
    assert code == code_of_the_tree(struct)


def test_a_page_shows_a_policy_in_cpp():
    assert (WRITING_POLICIES, "H2o") in [(page, found[1]) for page, found in SHOWN_CODE]


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= README_LINES


def test_the_readme_lists_every_policy():
    """In rows of families, and with the right number in the first sentence."""
    text = README.read_text()
    cards = json.loads(run("kvreplay policies --json"))
    names = {card["name"] for card in cards}
    families: dict[str, set[str]] = {}
    for card in cards:
        families.setdefault(card["family"], set()).add(card["name"])
    rows = re.findall(r"^\| [a-z ]+ \| (.*`.*) \|$", text.partition("## Policies")[2], re.MULTILINE)
    listed = [set(re.findall(r"`([^`]+)`", row)) & names for row in rows]
    assert sorted(map(sorted, listed)) == sorted(map(sorted, families.values()))
    assert f"{len(names) - len(families['controls'])} KV-cache policies" in text.replace("\n", " ")


def test_shown_policies_are_understood(tmp_path):
    text = WRITING_POLICIES.read_text()
    [file] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(file)
    shown = [line.partition("  #")[0] for line in re.findall(r"^-p .*$", text, re.MULTILINE)]
    asked = " ".join(shown).replace("@mine.yaml", f"@{tmp_path}/mine.yaml")
    planned = run(f"kvreplay replay traces/smollm2-135m-needle.h5 {asked} -b 0.1 -o {tmp_path}/run --dry-run --json")
    policies = {cell["policy"] for cell in json.loads(planned)["traces"][0]["cells"]}
    assert len(policies) == len(shown) - 1 + 2 + 3  # two in the file, three controls
    assert policies > {"layers:0-14=(chunkkv:chunk=20),15-29=snapkv", "chunkkv:chunk=20,reuse=2", "oracle"}


def test_the_shown_experiment_is_the_file():
    [shown] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "experiments.md").read_text(), re.DOTALL)
    assert shown == (ROOT / "docs" / "experiment.yaml").read_text()


def test_python_that_reads_results_runs():
    """After the replay that the README shows first."""
    page = (ROOT / "docs" / "results.md").read_text()
    [shown] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run(commands(CONSOLE.findall(README.read_text())[0])[0])
    printed = subprocess.run([sys.executable, "-c", shown], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "snapkv" in printed and "oracle" in printed


def test_python_of_its_page_runs():
    """One block after the other, in one session."""
    page = (ROOT / "docs" / "python.md").read_text()
    shown = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    policy = (ROOT / "docs" / "value_attention.py").read_text()
    assert policy in shown and f"```py\n{policy}```" in README.read_text()
    checks = "assert attention.shape == (9, 480) and keys.shape == (3, 512, 64) and kept.mask().shape == (30, 3, 480)\n"
    checks += "assert set(measured.cells.policy) >= {'given'} and set(other.cells.policy) >= {'Sloped', 'snapkv'}\n"
    subprocess.run([sys.executable, "-W", "error", "-c", shown + checks], cwd=ROOT, check=True)


@pytest.mark.parametrize("page, found", GENERATED_PARTS, ids=[found[1] for _, found in GENERATED_PARTS])
def test_generated_parts_are_up_to_date(page, found):
    _, command, shown, _ = found
    assert run(command) == shown


def test_the_shown_violations_are_those_of_validate(tmp_path):
    """Of a file that a writer of another program might have left."""
    [shown] = re.findall(
        r"```\n(exported\.h5: invalid\n.*?)```", (ROOT / "traces" / "FORMAT.md").read_text(), re.DOTALL
    )
    run(f"kvreplay synth gaussian --layers 2 --prompt 64 -o {tmp_path}/exported.h5")
    with h5py.File(tmp_path / "exported.h5", "r+") as file:
        del file["model"].attrs["softmax_scale"]
        file["model"].attrs["softmax_scale"] = 1
        whole = file["layers/001/v"][()]
        del file["layers/001/v"]
        chunks = (1, whole.shape[1] // 4, whole.shape[2])
        part = file["layers/001"].create_dataset("v", whole.shape, whole.dtype, chunks=chunks)
        for index in range(7):
            head, quarter = divmod(index, 4)
            block = slice(quarter * chunks[1], (quarter + 1) * chunks[1])
            part[head, block] = whole[head, block]
    assert run(f"cd {tmp_path} && (kvreplay validate exported.h5 || [ $? = 1 ])") == shown


def test_tables_of_the_format_page_are_those_of_the_schema():
    subprocess.run([sys.executable, ROOT / "traces" / "format_tables.py", "--check"], check=True)
