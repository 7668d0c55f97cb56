"""Broken command lines, each refused in its own words with its own exit code, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_traces import PROGRAM

USAGE, INPUT, CAPABILITY, RESOURCES = 2, 3, 4, 5

EMPTY = "empty list element: expected a value beside each comma"
# Commands as one would type them in a folder with fixture.h5 (P 12, G 4, L 4), prompt.h5 (no continuation), late.h5
# (P 32, G 4, only the last 8 queries), window.h5 (sliding windows only), norope.h5 (no RoPE), note.txt, files of
# policies that cannot be meant, and the folder foreign/, which holds a file of somebody else.
REPLAY = "replay fixture.h5"
H2O = f"{REPLAY} -p h2o -b 0.5"
NAMES = subprocess.run([PROGRAM, "policies", "--names"], capture_output=True, text=True, check=True).stdout.split()
POLICIES = f"one of {len(NAMES)} names, such as "
LISTED = "(see kvreplay policies)"
QUESTION = "question=last,question_tokens=6"
COVER = "layers: ranges must cover each treated layer once: expected 0-3, found"
SPANS = "one of context, question, answer"

NO_HDF5 = "expected an HDF5 file, found another file format; give a trace (.h5); copy it again if it is damaged"
LINES: list[tuple[int, str, str]] = [
    # the program
    (USAGE, "snyth", "snyth: unknown command: did you mean synth?"),
    (USAGE, "help replya", "replya: unknown command: did you mean replay?"),
    (
        USAGE,
        "--versoin",
        "--versoin: unknown option before the command: expected --help, --version, or kvreplay COMMAND OPTIONS",
    ),
    (
        USAGE,
        "-j info",
        "-j: unknown option before the command: expected --help, --version, or kvreplay COMMAND OPTIONS",
    ),
    (USAGE, "doctor now", "doctor: unexpected argument: found now"),
    (USAGE, "completion tosh", "completion: unknown shell: expected one of bash, zsh, fish, found tosh"),
    (USAGE, "completion", "completion: missing argument: expected bash|zsh|fish"),
    (
        CAPABILITY,
        "capture",
        "capture: kvreplay-capture is not installed: expected tools/setup build python, run in kvreplay's source "
        "folder, "
        "and .venv/bin on PATH",
    ),
    (
        CAPABILITY,
        "plot out",
        "plot: kvreplay-plot is not installed: expected tools/setup build python, run in kvreplay's source folder, "
        "and .venv/bin on PATH",
    ),
    # lists
    (USAGE, "policies snapkw", "snapkw: unknown policy: did you mean snapkv?"),
    (USAGE, "policies h2o full", "policies: unexpected argument: found full"),
    (USAGE, "policies h2o --parts", "--parts: lists all parts; it takes no policy: expected no argument, found h2o"),
    (USAGE, "metrics kv_byte", "kv_byte: unknown metric: did you mean kv_bytes?"),
    # synth
    (USAGE, "synth", "synth: missing argument: expected KIND"),
    (USAGE, "synth gausian -o new.h5", "gausian: unknown kind of synthetic trace: did you mean gaussian?"),
    (USAGE, "synth fixture", "synth: no output file: expected -o FILE"),
    (USAGE, "synth sinks needle -o new.h5", "synth: unexpected argument: found needle"),
    (USAGE, "synth sinks -o new.h5 --layers 0", "--layers: out of range: expected 1..2147483647, found 0"),
    (USAGE, "synth sinks -o new.h5 --kv-heads 3", "kv_heads: value: expected a divisor of 8, found 3"),
    (
        USAGE,
        "synth sinks -o new.h5 --dtype int8",
        "--dtype: unknown value: expected one of float16, bfloat16, float32, found int8",
    ),
    (
        USAGE,
        "synth sinks -o new.h5 --queries first:3",
        "--queries: unknown value: expected all or last:N, found first:3",
    ),
    (
        USAGE,
        "synth sinks -o new.h5 --sliding-window 4,-1",
        "--sliding-window: out of range: expected 0 or more, found -1",
    ),
    (
        USAGE,
        "synth sinks -o new.h5 --sliding-window 4,,8",
        f'--sliding-window: {EMPTY}, found "4,,8"',
    ),
    (
        USAGE,
        "synth sinks -o new.h5 --prompt 2147483647",
        "prefill: value: expected at most 429496697, found 2147483647",
    ),
    (USAGE, "synth sinks -o new.h5 --softcap soft", '--softcap: not a number: expected a number, found "soft"'),
    (
        INPUT,
        "synth sinks -o fixture.h5",
        "fixture.h5: exists: expected another name, or --force to overwrite, found a file",
    ),
    (INPUT, "synth sinks -o none/new.h5", "none/new.h5.partial: cannot be made: No such file or directory"),
    # reading
    (USAGE, "info", "info: missing argument: expected TRACE..."),
    (INPUT, "info none.h5", "none.h5: cannot be opened: No such file or directory"),
    (INPUT, "info note.txt", f"note.txt: signature: {NO_HDF5}"),
    (INPUT, "validate none.h5", "none.h5: cannot be opened: No such file or directory"),
    (INPUT, "validate foreign", "foreign: kind: expected a file, found a directory"),
    (USAGE, "diff fixture.h5", "diff: missing argument: expected TRACE|RUN TRACE|RUN"),
    (USAGE, "diff fixture.h5 fixture.h5 --tolerance -1", "--tolerance: out of range: expected 0 or more, found -1"),
    (INPUT, "diff fixture.h5 none.h5", "none.h5: no such file or folder"),
    (INPUT, "diff fixture.h5 note.txt", f"note.txt: signature: {NO_HDF5}"),
    # what to replay
    (USAGE, "replay", "replay: missing argument: expected TRACE..."),
    (USAGE, "replay -p h2o -b 0.5", "replay: missing argument: expected TRACE..."),
    (USAGE, f"{REPLAY} -b 0.5", "replay: no policy to replay: expected -p POLICY,..."),
    (USAGE, f"{REPLAY} -p h2o", "replay: no budget: expected -b BUDGET,... or --compression-ratio RATIO,..."),
    (INPUT, "replay none.h5 -p h2o -b 0.5", "none.h5: cannot be opened: No such file or directory"),
    (INPUT, "replay foreign -p h2o -b 0.5", "foreign: no trace in this folder: expected files *.h5"),
    (
        USAGE,
        f"{H2O} fixture.h5",
        "fixture.h5: another trace has the same name: expected unique trace names, found fixture",
    ),
    (
        INPUT,
        "replay prompt.h5 -p h2o -b 0.5",
        "prompt.h5: no continuation, so no evaluation queries: expected tokens after the "
        "prompt, or another --eval such as last:32, found 0 tokens",
    ),
    (
        INPUT,
        "replay late.h5 -p h2o -b 0.5",
        "late.h5:/layers/000/q_positions: missing stored queries for h2o: expected queries 0..31, found no query 0",
    ),
    (
        INPUT,
        "replay late.h5 -p local -b 0.5 --eval all",
        "late.h5:/layers/000/q_positions: missing stored queries for "
        "--eval all: expected queries 0..35, found no query 0",
    ),
    (
        INPUT,
        "replay window.h5 -p h2o -b 0.5",
        "window.h5: every layer has a sliding window or chunks: expected a layer without them, or --sliding treat",
    ),
    # policies
    (USAGE, f"{REPLAY} -p snapkw -b 0.5", "snapkw: unknown policy: did you mean snapkv?"),
    (
        USAGE,
        f"{REPLAY} -p sanpkv,full,h20 -b 0.5",
        "--policy: sanpkv: unknown policy: did you mean snapkv?; h20: unknown policy: did you mean h2o?",
    ),
    (
        USAGE,
        f"{REPLAY} -p zzzzzzzz -b 0.5",
        f"zzzzzzzz: unknown policy: expected {POLICIES}kvzip, ada-kv, cam {LISTED}, found zzzzzzzz",
    ),
    (USAGE, f"{REPLAY} -p h2o,,full -b 0.5", f'--policy: {EMPTY}, found "h2o,,full"'),
    (USAGE, f"{REPLAY} -p h2o, -b 0.5", f'--policy: {EMPTY}, found "h2o,"'),
    (USAGE, f"{REPLAY} -p snapkv: -b 0.5", f'snapkv: {EMPTY}, found ""'),
    (USAGE, f"{REPLAY} -p : -b 0.5", f"policy: no name: expected {POLICIES}pq, cam, cur {LISTED}"),
    (
        USAGE,
        f"{REPLAY} -p window=3 -b 0.5",
        "policy: parameter before the first policy: expected NAME[:KEY=VALUE,...], found window=3",
    ),
    (USAGE, f"{REPLAY} -p snapkv:windwo=3 -b 0.5", "snapkv: unknown parameter windwo: did you mean window?"),
    (USAGE, f"{REPLAY} -p full:x=1 -b 0.5", "full: takes no parameters: expected a part, as in select=chunks, found x"),
    (USAGE, f"{REPLAY} -p snapkv:window -b 0.5", 'snapkv: not an assignment: expected KEY=VALUE, found "window"'),
    (
        USAGE,
        f"{REPLAY} -p snapkv:window=3,window=4 -b 0.5",
        "snapkv: given more than once: expected one value, found window",
    ),
    (USAGE, f"{REPLAY} -p snapkv:window=x -b 0.5", 'snapkv:window: not a number: expected a whole number, found "x"'),
    (USAGE, f"{REPLAY} -p snapkv:window=0 -b 0.5", "snapkv:window: out of range: expected 1.., found 0"),
    (USAGE, f"{REPLAY} -p snapkv:kernel=4 -b 0.5", "snapkv:kernel: out of range: expected 1.., odd, found 4"),
    (
        USAGE,
        f"{REPLAY} -p snapkv:pool=sum -b 0.5",
        'snapkv:pool: unknown value: expected one of none, max, avg, found "sum"',
    ),
    (
        USAGE,
        f"{REPLAY} -p snapkv:preset=mine -b 0.5",
        "snapkv:preset: unknown value: expected one of factory, snapkv-paper, snapkv-code, kvpress, factory-needle, "
        'dynamickv, found "mine"',
    ),
    (
        USAGE,
        f"{REPLAY} -p h2o:recent=1.5 -b 0.5",
        "h2o:recent: out of range: expected a number of tokens, or a fraction 0.0..1.0, found 1.5",
    ),
    (USAGE, f"{REPLAY} -p h2o:recent=-1 -b 0.5", "h2o:recent: out of range: expected 0 or more, found -1"),
    (
        USAGE,
        f"{REPLAY} -p h2o:overlap=maybe -b 0.5",
        'h2o:overlap: not a Boolean: expected false or true, found "maybe"',
    ),
    (
        USAGE,
        f"{REPLAY} -p random:seed=-1 -b 0.5",
        'random:seed: not a number: expected a whole number, 0 or more, found "-1"',
    ),
    (
        USAGE,
        f"{REPLAY} -p streaming-llm:sinks=13 -b 0.5",
        "streaming-llm:sinks: exceeds the trace: expected at most 12 tokens, found 13",
    ),
    (
        USAGE,
        f"{REPLAY} -p chunkkv:reuse=5 -b 0.5",
        "chunkkv:reuse: exceeds the trace: expected at most 4 layers, found 5",
    ),
    (
        USAGE,
        f"{REPLAY} -p oracle:counts=(snapkv -b 0.5",
        '--policy: unbalanced parentheses: found "oracle:counts=(snapkv"',
    ),
    (USAGE, f"{REPLAY} -p oracle:counts=(snapkw) -b 0.5", "snapkw: unknown policy: did you mean snapkv?"),
    (
        USAGE,
        f"{REPLAY} -p oracle:counts=(oracle:counts=(h2o)) -b 0.5",
        "oracle:counts: the policy takes its own counts from another policy: "
        "expected a policy that does not use another policy's counts, found oracle:counts=h2o",
    ),
    # policies put together
    (USAGE, f"{REPLAY} -p h2o:select=chunk -b 0.5", "h2o:select: unknown value chunk: did you mean chunks?"),
    (USAGE, f"{REPLAY} -p h2o:score=windw -b 0.5", "h2o:score: unknown value windw: did you mean window?"),
    (USAGE, f"{REPLAY} -p h2o:select=chunks,chunk=0 -b 6", "chunks:chunk: out of range: expected 1.., found 0"),
    (
        USAGE,
        f"{REPLAY} -p hybrid:chunkkv.chnk=3 -b 0.5",
        "hybrid: unknown parameter chunkkv.chnk: did you mean chunkkv.chunk?",
    ),
    (
        USAGE,
        f"{REPLAY} -p strided:select=redundancy -b 0.5",
        "strided: the similarity of tokens covers all heads together: expected heads=layer, found a set for each head",
    ),
    (
        USAGE,
        f"{REPLAY} -p snapkv:schedule=online -b 0.5",
        "snapkv: schedule=online evicts by attention, query by query: expected score=cumulative or score=newest, "
        "found another score",
    ),
    (
        USAGE,
        f"{REPLAY} -p sca:schedule=threshold(2,4) -b 0.5",
        "sca: threshold(peak,keep): expected 1 <= keep < peak, found peak 2, keep 4",
    ),
    (
        USAGE,
        f"{REPLAY} -p random:schedule=threshold(0.25,0.5) -b 0.5",
        "random: threshold(peak,keep): expected 1 <= keep < peak, found peak 3, keep 6",
    ),
    (
        USAGE,
        f"{REPLAY} -p random:schedule=threshold(8,4,true,2) -b 0.5",
        "threshold: too many values: expected at most 3, found threshold(8,4,true,2)",
    ),
    (
        USAGE,
        f"{REPLAY} -p sca:schedule=every -b 0.5",
        "sca:schedule: unknown value: expected once, or threshold(PEAK,KEEP), found every",
    ),
    (
        USAGE,
        f"{REPLAY} -p oracle:counts=(kivi) -b 0.5",
        "oracle:counts: the policy keeps every token: expected a policy that evicts, found kivi",
    ),
    (USAGE, f"{REPLAY} -p layers -b 0.5", f"{COVER} no range"),
    (USAGE, f"{REPLAY} -p layers:0-1=snapkv -b 0.5", f"{COVER} 0-1"),
    (USAGE, f"{REPLAY} -p layers:0-1=snapkv,3=h2o -b 0.5", f"{COVER} 0-1, 3"),
    (USAGE, f"{REPLAY} -p layers:0-2=snapkv,2-3=h2o -b 0.5", f"{COVER} 0-2, 2-3"),
    (USAGE, f"{REPLAY} -p layers:0-4=snapkv -b 0.5", f"{COVER} 0-4"),
    (
        USAGE,
        f"{REPLAY} -p layers:3-1=snapkv -b 0.5",
        "layers:3-1: ends before it begins: expected FIRST-LAST, found 3-1",
    ),
    (USAGE, f"{REPLAY} -p layers:0-3=(snapkw) -b 0.5", "snapkw: unknown policy: did you mean snapkv?"),
    (
        INPUT,
        f"{REPLAY} -p finch:{QUESTION} -b 6",
        "finch: the 6 tokens of the question fill the budget: expected a budget of at least 7 tokens, found 6",
    ),
    *(
        (
            INPUT,
            f"replay norope.h5 -p {policy} -b 6",
            f"norope.h5:/model/rope: keys cannot be moved to cache positions for {policy.split(':')[0]}: expected "
            "the RoPE frequencies of the model, found "
            "none",
        )
        for policy in ("streaming-llm:positions=cache", "finch:question_tokens=2", "snapkv:store=cache")
    ),
    *(
        (
            INPUT,
            f"replay norope.h5 -p {policy} -b 6",
            f"norope.h5:/model/rope: RoPE of keys and queries cannot be undone for {policy}: expected the RoPE "
            "frequencies of the model, "
            "found none",
        )
        for policy in ("leverage", "compactor", "expected-attention")
    ),
    (
        USAGE,
        f"{REPLAY} -p knorm:skip_layers=(0,9) -b 0.9",
        "skip_layers: no such layer: expected 0..3, found 9",
    ),
    (
        USAGE,
        f"{REPLAY} -p knorm:skip_layers=x -b 0.5",
        'skip_layers: not a number: expected a whole number, found "x"',
    ),
    # files of policies
    (INPUT, f"{REPLAY} -p @missing.yaml -b 0.5", "missing.yaml: cannot be read: expected a YAML file with policies"),
    (
        USAGE,
        f"{REPLAY} -p @broken.yaml -b 0.5",
        "broken.yaml:2: not YAML: expected policies, found end of sequence flow not found",
    ),
    (
        USAGE,
        f"{REPLAY} -p @listed.yaml -b 0.5",
        "listed.yaml:3: value of window: expected a scalar, or a list of scalars, found a mapping",
    ),
    (
        USAGE,
        f"{REPLAY} -p @nameless.yaml -b 0.5",
        "nameless.yaml:2: not a policy: expected a string, or a mapping with the key policy, found a mapping without "
        "the key",
    ),
    (
        USAGE,
        f"{REPLAY} -p @empty.yaml -b 0.5",
        "empty.yaml: contains no policy: expected one policy, or a list of them",
    ),
    # budgets
    (USAGE, f"{REPLAY} -p h2o -b 0", "budget 0: out of range: expected 1..2147483647, found 0"),
    (USAGE, f"{REPLAY} -p h2o -b -3", "budget -3: out of range: expected 1..2147483647, found -3"),
    (USAGE, f"{REPLAY} -p h2o -b 1.5", "budget 1.5: out of range: expected a fraction in (0, 1], found 1.5"),
    (USAGE, f"{REPLAY} -p h2o -b 0.0", "budget 0.0: out of range: expected a fraction in (0, 1], found 0.0"),
    (USAGE, f"{REPLAY} -p h2o -b 200%", "budget 200%: out of range: expected a fraction in (0, 1], found 200%"),
    (
        USAGE,
        f"{REPLAY} -p h2o -b 0.1,abc",
        "budget abc: not a budget: expected a share (0.1 or 10%), a number of tokens (48) or bytes (1MiB), found abc",
    ),
    (
        USAGE,
        f"{REPLAY} -p h2o -b 99999999999",
        "budget 99999999999: out of range: expected 1..2147483647, found 99999999999",
    ),
    (USAGE, f"{REPLAY} -p h2o -b ,", f'--budget: {EMPTY}, found ","'),
    (USAGE, f"{REPLAY} -p h2o -b 6,,6", f'--budget: {EMPTY}, found "6,,6"'),
    (USAGE, f"{REPLAY} -p h2o -b 6,", f'--budget: {EMPTY}, found "6,"'),
    # options
    (USAGE, f"{H2O} --budgte 3", "replay: unknown option --budgte: did you mean --budget?"),
    (USAGE, f"{REPLAY} -p", "--policy: needs a value: expected POLICY,..."),
    (USAGE, f"{REPLAY} -p h2o -b", "--budget: needs a value: expected BUDGET,..."),
    (USAGE, f"{H2O} --output=", "--output: needs a value: expected DIR"),
    (USAGE, f"{H2O} --force=yes", "--force: takes no value"),
    (USAGE, f"{H2O} --device cpu --device cpu", "--device: given more than once: expected one value"),
    (USAGE, f"{H2O} --device gpu", "--device: unknown device: expected auto, cpu or cuda[:N], found gpu"),
    (
        USAGE,
        f"{H2O} --device cpu --device-memory 1G",
        "--device-memory: limits GPU memory only: expected --device cuda or auto, found --device cpu",
    ),
    (USAGE, f"{H2O} --device cuda:x", '--device: not a number: expected a whole number, found "x"'),
    (
        USAGE,
        f"{H2O} --metrics atention_recall",
        "atention_recall: unknown metric: did you mean attention_recall?",
    ),
    (
        USAGE,
        f"{H2O} --metrics attention_recall:promt",
        "attention_recall: unknown variant promt: did you mean prompt?",
    ),
    (USAGE, f"{H2O} --metrics ,", f'--metrics: {EMPTY}, found ","'),
    (USAGE, f"{H2O} --metrics kv_bytes,", f'--metrics: {EMPTY}, found "kv_bytes,"'),
    (
        INPUT,
        f"{H2O} --metrics output_error:residual -o out",
        "fixture.h5:/layers/000/wo: no output projection for output_error:residual: expected one, as capture --with-wo "
        "stores it, found none",
    ),
    (USAGE, f"{H2O} --detail heads", "--detail: unknown value: expected one of summary, layer, head, found heads"),
    (USAGE, f"{H2O} --save scores,score", "--save: unknown value: expected one of scores, attention, found score"),
    (USAGE, f"{H2O} --save scores,", f'--save: {EMPTY}, found "scores,"'),
    (USAGE, f"{H2O} --sliding maybe", "--sliding: unknown value: expected one of skip, treat, found maybe"),
    (
        USAGE,
        f"{H2O} --progress sometimes",
        "--progress: unknown value: expected one of auto, always, never, found sometimes",
    ),
    (USAGE, f"{H2O} --threads -1", "--threads: out of range: expected 0..4096, found -1"),
    (USAGE, f"{H2O} --threads 99999999999", "--threads: out of range: expected 0..4096, found 99999999999"),
    (USAGE, f"{H2O} --threads two", '--threads: not a number: expected a whole number, found "two"'),
    (USAGE, f"{H2O} --seed -1", '--seed: not a random seed: expected 0..2^64-1, found "-1"'),
    (
        USAGE,
        f"{H2O} --memory lots",
        '--memory: not a size: expected a number of bytes, as 4096, 512M or 1.5G, found "lots"',
    ),
    (
        USAGE,
        f"{H2O} --eval tomorrow",
        "eval: unknown value: expected one of continuation, last:N, span:NAME, all, stride:K, found tomorrow",
    ),
    (USAGE, f"{H2O} --eval last:0", "eval last:0: out of range: expected 1 or more, found 0"),
    (USAGE, f"{H2O} --eval last:13", "eval last:13: longer than the prompt: expected at most 12, found 13"),
    (USAGE, f"{H2O} --eval stride:0", "eval stride:0: out of range: expected 1 or more, found 0"),
    (INPUT, f"{H2O} --eval span:nothing", f"fixture.h5: unknown span: expected {SPANS}, found nothing"),
    (USAGE, f"{H2O} --boundary 0", "boundary 0: outside the prompt: expected 1 or more, found 0"),
    (USAGE, f"{H2O} --boundary 13", "boundary 13: outside the prompt: expected 1..12, found 13"),
    (USAGE, f"{H2O} --boundary half", 'boundary half: not a number: expected a whole number, found "half"'),
    (INPUT, f"{H2O} --boundary span:nothing", f"fixture.h5: unknown span: expected {SPANS}, found nothing"),
    (INPUT, "info fixture.h5 --boundary span:nothing", f"fixture.h5: unknown span: expected {SPANS}, found nothing"),
    (USAGE, "info fixture.h5 --boundary 13", "boundary 13: outside the prompt: expected 1..12, found 13"),
    # budgets that grow, budgets of memory, and pages
    (
        USAGE,
        f"{REPLAY} -p h2o -b 12@seen",
        "budget 12@seen: @seen needs a fraction: expected a fraction in (0, 1] of the tokens seen, as in 0.1@seen, "
        "found 12",
    ),
    (
        USAGE,
        f"{REPLAY} -p streaming-llm:rolling=true -b 0.5@seen",
        "streaming-llm: a rolling window cannot grow: evicted tokens are lost: expected a budget without "
        "@seen, or schedule=once, found 0.5@seen",
    ),
    (USAGE, f"{REPLAY} -p h2o -b 1MB", "budget 1MB: unknown unit of memory: expected KiB, MiB or GiB, found 1MB"),
    (
        USAGE,
        f"{REPLAY} -p h2o -b 0.1KiB",
        "budget 0.1KiB: too small for one token of h2o in fixture: expected at least 0.125 KiB, one token in each head "
        "of each "
        "layer, found 0.1KiB",
    ),
    (
        USAGE,
        f"{REPLAY} -p snapkv:window=2,store=quantised -b 1KiB",
        "snapkv: the bytes of store=quantised do not follow from the number of tokens: expected a budget in tokens, "
        "found a budget in bytes",
    ),
    (
        USAGE,
        f"{REPLAY} -p knorm:store=q8_0,skip_layers=1 -b 1KiB",
        "knorm: allocates tokens among layers, in some of which store=q8_0 is exact: expected skip_layers=none, or a "
        "budget in tokens, found a budget in bytes",
    ),
    (
        USAGE,
        f"{H2O} --structure page=0,heads=layer",
        "--structure:page: out of range: expected 1.., found 0",
    ),
    (
        USAGE,
        f"{H2O} --structure heads=rows",
        '--structure:heads: unknown value: expected one of layer, kv, query, own, found "rows"',
    ),
    (USAGE, f"{H2O} --structure 16", "--structure: not an assignment: expected page=16,heads=layer, found 16"),
    (
        USAGE,
        f"{REPLAY} -p sca -b 0.5 --structure page=4",
        "sca: the selector reads scores: expected a score, as in score=window, found none",
    ),
    (
        USAGE,
        f"{REPLAY} -p hybrid -b 0.5 --structure page=4",
        "hybrid: has a separate plan for each range of layers: expected layers:0-14=(A:...),15-29=(B:...), found "
        "chunks",
    ),
    (
        USAGE,
        f"{REPLAY} -p h2o:heads=kv -b 0.5 --structure page=4",
        "h2o: given more than once: expected one value, found heads",
    ),
    (
        USAGE,
        f"{H2O} -o foreign",
        "foreign: contains other files: expected an empty folder, or a folder of results, found x",
    ),
    (USAGE, f"{H2O} -o note.txt", "note.txt: not a folder: expected a folder for results, found a file"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the lines are typed."""
    folder = tmp_path_factory.mktemp("command_lines")
    for line in (
        "fixture -o fixture.h5",
        "gaussian -o prompt.h5 --layers 1 --prompt 16 --continuation 0",
        "gaussian -o late.h5 --layers 1 --prompt 32 --continuation 4 --queries last:8",
        "gaussian -o window.h5 --layers 2 --prompt 32 --sliding-window 8",
        "gaussian -o norope.h5 --layers 1 --prompt 32 --continuation 4 --rope-base 0",
    ):
        subprocess.run([PROGRAM, "synth", *line.split()], cwd=folder, check=True, capture_output=True)
    (folder / "note.txt").write_text("no trace\n")
    (folder / "broken.yaml").write_text("- policy: [snapkv\n")
    (folder / "listed.yaml").write_text("- h2o\n- policy: snapkv\n  window: {a: 2}\n")
    (folder / "nameless.yaml").write_text("- h2o\n- window: 3\n")
    (folder / "empty.yaml").write_text("")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "x").write_text("somebody else's\n")
    return folder


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Type `line`, where no other program of kvreplay is installed."""
    bare = {**os.environ, "PATH": "/usr/bin:/bin"}
    return subprocess.run([PROGRAM, *line.split()], cwd=folder, env=bare, capture_output=True, text=True, timeout=300)


def listing(folder: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize(("code", "line", "message"), LINES, ids=[line for _, line, _ in LINES])
def test_a_broken_line_is_refused(code: int, line: str, message: str, folder: Path) -> None:
    if code == CAPABILITY and (PROGRAM.parent / f"kvreplay-{line.split()[0]}").exists():
        pytest.skip("it lies beside the program")
    before = listing(folder)
    answer = run(line, folder)
    assert (answer.returncode, answer.stderr, answer.stdout) == (code, f"kvreplay: {message}\n", "")
    assert listing(folder) == before


def test_the_lines_differ() -> None:
    assert len({line for _, line, _ in LINES}) == len(LINES) >= 40


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_missing_device_is_a_missing_capability(device: str, folder: Path) -> None:
    backends = {card["name"]: card for card in json.loads(run("doctor --json", folder).stdout)["backends"]}
    if backends["cuda"]["runs"]:
        pytest.skip("a machine with a CUDA device")
    answer = run(f"{H2O} --device {device}", folder)
    assert answer.returncode == CAPABILITY
    if "not in this build" in backends["cuda"]["description"]:
        assert answer.stderr == f"kvreplay: --device {device}: CUDA is not in this build: expected --device cpu\n"
    else:
        assert answer.stderr.startswith(f"kvreplay: --device {device}: CUDA: no usable device: found cudaError")


def test_a_plan_that_does_not_fit_is_refused(folder: Path) -> None:
    answer = run(f"{H2O} --memory 1k -o new", folder)
    assert answer.returncode == RESOURCES
    assert answer.stderr.startswith("kvreplay: --memory: too little memory for the plan: expected at least ")
    assert answer.stderr.endswith(" MiB, found 1.0 KiB\n")
    assert not (folder / "new").exists()


def test_an_empty_policy_is_refused(folder: Path) -> None:
    words = [PROGRAM, "replay", "fixture.h5", "-p", "", "-b", "0.5"]
    answer = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (USAGE, "")
    assert answer.stderr == f'kvreplay: --policy: {EMPTY}, found ""\n'


def test_a_trace_larger_than_the_disk_is_refused_before_it_is_written(folder: Path) -> None:
    before = listing(folder)
    answer = run("synth gaussian -o new.h5 --layers 60000 --query-heads 64 --kv-heads 64 --prompt 1000000", folder)
    assert (answer.returncode, answer.stdout) == (RESOURCES, "")
    # 3 tensors x layers x heads x (prompt + continuation) x head_dim x 2 bytes
    size = 3 * 60000 * 64 * (1000000 + 32) * 64 * 2 / 2**20
    start = f"kvreplay: new.h5: too little space on the disk for the trace: expected at least {size:.1f} MiB, found "
    assert answer.stderr.startswith(start)
    assert answer.stderr.endswith(" MiB\n")
    assert listing(folder) == before


def test_control_characters_do_not_break_the_line(folder: Path) -> None:
    answer = subprocess.run([PROGRAM, "info", "no\nsuch\x1b[1m\ttrace.h5"], cwd=folder, capture_output=True, text=True)
    assert answer.returncode == INPUT
    assert answer.stderr == "kvreplay: no\\nsuch\\x1b[1m\\x09trace.h5: no such trace: expected files *.h5\n"


def test_a_trace_under_two_names_is_refused(folder: Path) -> None:
    shutil.copy(folder / "fixture.h5", folder / "copy.h5")
    [trace] = json.loads(run("info --json --no-estimate copy.h5", folder).stdout)
    answer = run("replay fixture.h5 copy.h5 -p h2o -b 0.5", folder)
    expected = f"kvreplay: copy.h5: trace listed more than once: found {trace['hash']}\n"
    assert (answer.returncode, answer.stdout, answer.stderr) == (USAGE, "", expected)


def test_a_run_is_not_compared_with_a_trace(folder: Path) -> None:
    assert run(f"{H2O} -o run", folder).returncode == 0
    answer = run("diff fixture.h5 run", folder)
    expected = "kvreplay: run: cannot be compared with fixture.h5: expected a trace, found a run or its cells\n"
    assert (answer.returncode, answer.stderr) == (USAGE, expected)


def test_a_run_with_failed_cells_lists_them(folder: Path) -> None:
    answer = run("replay late.h5 -p h2o,local -b 0.5 -o partly", folder)
    assert answer.returncode == 6
    assert answer.stderr == (
        "kvreplay: failed: late, h2o at budget 0.5: late.h5:/layers/000/q_positions: missing stored queries for h2o: "
        "expected "
        "queries 0..31, found no query 0\n"
    )
    assert "local" in answer.stdout


def test_a_question_without_room_fails_alone(folder: Path) -> None:
    answer = run(f"replay fixture.h5 -p finch:{QUESTION},local -b 6 -o no_room", folder)
    assert answer.returncode == 6
    assert answer.stderr == (
        f"kvreplay: failed: fixture, finch:{QUESTION} at budget 6: finch: the 6 tokens of the question fill the "
        "budget: expected a budget of at least 7 tokens, found 6\n"
    )
    cells = json.loads((folder / "no_room/run.json").read_text())["cells"]
    states = {cell["policy"]: cell["state"] for cell in cells}
    assert states == {"finch": "failed", "local": "done", "full": "done", "random": "done", "oracle": "done"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_no_success(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        answer = subprocess.run([PROGRAM, "policies"], cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (answer.returncode, answer.stderr) == (RESOURCES, "kvreplay: standard output: cannot be written\n")
