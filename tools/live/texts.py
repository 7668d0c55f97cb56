"""Metrics of a generated text, compared with the answers of its prompt and with the text of the full cache.

Texts are compared after LongBench's normalisation (https://github.com/THUDM/LongBench, metrics.py): lower case, without
punctuation, without the articles a, an and the, words separated by single spaces.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from kvreplay.live.metrics import Value


def normalised(text: str) -> str:
    """The text after LongBench's normalisation."""
    text = "".join(one for one in text.lower() if one not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall of words, counted with repetitions."""
    words, wanted = normalised(text).split(), normalised(answer).split()
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def repetition(tokens: Sequence[int], length: int = 4) -> float:
    """Share of the n-grams of `length` tokens that occurred before; NaN for fewer tokens."""
    runs = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else math.nan


def same_tokens(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first difference."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, reference, strict=False))
    return sum(1 for _ in equal)


def answered(text: str, answers: Sequence[str]) -> Iterator[Value]:
    """How well the text answers."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    plain = normalised(text)
    yield Value("exact_match", "", None, float(any(plain == normalised(one) for one in answers)))
    yield Value("contains", "", None, sum(one.lower() in text.lower() for one in answers) / len(answers))
    yield Value("f1", "", None, max(f1(text, one) for one in answers))
    yield Value("rouge_l", "", None, max(scorer.score(one, text)["rougeL"].fmeasure for one in answers))


def written(tokens: Sequence[int], reference: Sequence[int]) -> Iterator[Value]:
    """Metrics of a continuation that hold for any text: repetition, and tokens equal to the reference's."""
    yield Value("repetition", "", None, repetition(tokens))
    yield Value("same_tokens", "", None, float(same_tokens(tokens, reference)))
