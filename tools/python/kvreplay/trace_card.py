"""The metadata of traces: a table with one row a trace, and a card in Markdown, as Hugging Face datasets have it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvreplay.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa

LONGEST = 400  # characters of a prompt on the card
NOT_STATED = "not stated"


def facts(trace: Trace, with_text: bool) -> dict[str, Any]:
    """The metadata of a trace: its model and weights, its shape, its prompt. `with_text`: also text and token ids."""
    return {
        "name": trace.name,
        "trace_hash": trace.hash,
        "model": trace.model,
        "revision": trace.value("/model@source_hash") or None,  # SHA-256 of the weights
        "architecture": trace.attribute("/model", "architecture"),
        "dtype": trace.dtype,
        "producer": trace.value("/@producer"),
        "created": trace.value("/@created"),
        "synthetic": bool(trace.synthetic),
        "layers": trace.layers,
        "layer_index": [int(one) for one in trace["/model/layer_index"]],
        "query_heads": trace.query_heads,
        "kv_heads": trace.kv_heads,
        "head_dim": trace.head_dim,
        "value_dim": trace.value_dim,
        "prompt_tokens": trace.prompt,
        "tokens": trace.tokens,
        "spans": [span._asdict() for span in trace.spans],
        "text": trace.text if with_text and trace.text else None,
        "ids": [int(one) for one in trace.ids] if with_text else None,
    }


def schema() -> pa.Schema:
    """The types of `facts`: the same for every table, also for one without spans or text."""
    import pyarrow as pa

    span = pa.struct([("name", pa.string()), ("kind", pa.string()), ("begin", pa.int32()), ("end", pa.int32())])
    types = {
        "name": pa.string(), "trace_hash": pa.string(), "model": pa.string(), "revision": pa.string(),
        "architecture": pa.string(), "dtype": pa.string(), "producer": pa.string(), "created": pa.string(),
        "synthetic": pa.bool_(), "layers": pa.int32(), "layer_index": pa.list_(pa.int32()), "query_heads": pa.int32(),
        "kv_heads": pa.int32(), "head_dim": pa.int32(), "value_dim": pa.int32(), "prompt_tokens": pa.int32(),
        "tokens": pa.int32(), "spans": pa.list_(span), "text": pa.string(), "ids": pa.list_(pa.int32()),
    }  # fmt: skip
    return pa.schema(list(types.items()))


def card(rows: Sequence[dict[str, Any]], licence: str, tables: Sequence[str] = ()) -> str:
    """A dataset card. `tables`: names of the Parquet files beside it, each of which becomes a configuration."""
    header = [f"license: {json.dumps(licence)}"] if licence else []
    header += ["tags: [kv-cache, attention]", *(["configs:"] if tables else [])]
    for name in tables:
        header += [f"- config_name: {name}", f"  data_files: {name}.parquet"]
    models = dict.fromkeys((row["model"], row["revision"], row["architecture"], row["dtype"]) for row in rows)
    lines = [
        "---",
        *header,
        "---",
        "",
        f"# Attention traces of {', '.join(dict.fromkeys(row['model'] for row in rows))}",
        "",
    ]
    lines += [
        "Queries, keys and values of language models on the prompts below, captured for kvreplay.",
        "",
        "## Models",
        "",
    ]
    lines += _table(("model", "revision (SHA-256 of the weights)", "architecture", "type"),
                    [[one or NOT_STATED for one in model] for model in models])  # fmt: skip
    lines += ["", "## Traces", ""]
    lines += _table(("trace", "hash", "prompt", "continuation", "layers", "query / KV heads", "captured"),
                    [[row["name"], row["trace_hash"], row["prompt_tokens"], row["tokens"] - row["prompt_tokens"],
                      row["layers"], f"{row['query_heads']} / {row['kv_heads']}",
                      f"{(row['created'] or NOT_STATED)[:10]}, {row['producer'] or NOT_STATED}"
                      + (", synthetic" if row["synthetic"] else "")] for row in rows])  # fmt: skip
    lines += ["", "## Prompts", ""]
    for row in rows:
        named = ", ".join(f"{span['name']} [{span['begin']}, {span['end']})" for span in row["spans"]) or "none"
        lines += [f"**{row['name']}**. Spans in tokens: {named}.", "", *_quoted(row["text"]), ""]
    lines += ["## Licence", "", licence or f"{NOT_STATED.capitalize()}: model and prompts have their own licences."]
    if tables:
        lines += ["", "## Use", "", "```python", "from datasets import load_dataset", ""]
        lines += [f'{name} = load_dataset("FOLDER", "{name}", split="train")' for name in tables] + ["```"]
    return "\n".join([*lines, ""])


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]


def _quoted(text: str | None) -> list[str]:
    """The beginning of a text as a block of code, which Markdown leaves as it is."""
    if text is None:
        return ["The text is not included."]
    shown = text[:LONGEST] + (" …" if len(text) > LONGEST else "")
    return ["    " + line for line in shown.splitlines()]
