"""Okapi BM25, as Robertson and Zaragoza 2009, *The Probabilistic Relevance Framework: BM25 and Beyond*, section 3."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1 = 1.2  # how fast the weight of a repeated term saturates
B = 0.75  # how much long documents are discounted


def terms(text: str) -> list[str]:
    """Words and numbers of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


def bm25(documents: Sequence[str], query: str) -> list[float]:
    """The score of each document: the sum over the terms of the query of

        idf · f (k1 + 1) / (f + k1 (1 − b + b length / mean length)),   idf = ln(1 + (N − n + 0.5) / (n + 0.5))

    with f the frequency of the term in the document, N documents, and n of them with the term. A term that the query
    repeats counts as often. The + 1 in idf keeps terms of most documents from counting against them.
    """
    counts = [Counter(terms(document)) for document in documents]
    lengths = [sum(count.values()) for count in counts]
    mean_length = sum(lengths) / len(lengths) or 1.0
    scores = [0.0] * len(documents)
    for term in terms(query):
        n = sum(term in count for count in counts)
        idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            f = count[term]
            scores[i] += idf * f * (K1 + 1) / (f + K1 * (1 - B + B * length / mean_length))
    return scores
