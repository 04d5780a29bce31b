"""What is in a dataset, and what had to be left out."""

import re
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counts over one epoch, on all hosts together.

    Attributes:
        documents: records read.
        examples: what became of them: documents, or parts of documents that were split.
        tokens: positions that hold a token.
        trained_tokens: positions with a loss weight of 1.
        batches: batches of one host.
        fill_rate: the share of all positions that hold a token; the rest is padding.
        skipped: records that cannot be used.
        reasons: dict of why to how many, numbers and quotations left out.
        first_skipped: the message of the first one, with file and line.
        split: documents that were cut.
        dropped: documents that were left out, being too long.
    """

    documents: int = 0
    examples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    batches: int = 0
    fill_rate: float = 0.0
    skipped: int = 0
    reasons: dict = field(default_factory=dict)
    first_skipped: str | None = None
    split: int = 0
    dropped: int = 0

    def add(self, encoded, where):
        """Count what became of one record.

        Args:
            encoded: `Encoded`.
            where: name of the record's place, with which its problem begins.
        """
        self.documents += 1
        self.examples += len(encoded.examples)
        self.split += encoded.split
        self.dropped += encoded.dropped
        for example in encoded.examples:
            self.tokens += sum(len(ids) - 1 for ids, _ in example)
            self.trained_tokens += sum(int(mask[1:].sum()) for _, mask in example)
        if encoded.problem is not None:
            self.skipped += 1
            self.first_skipped = self.first_skipped or encoded.problem
            problem = encoded.problem.removeprefix(f"{where}: ")
            reason = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", problem)[:120]
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def __str__(self):
        lines = [
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.trained_tokens:,} of them trained on",
            f"{self.batches:,} batches, {self.fill_rate:.1%} filled",
        ]
        if self.split or self.dropped:
            lines.append(f"too long: {self.split:,} split, {self.dropped:,} dropped")
        lines += [f"skipped {count:,}: {reason}" for reason, count in self.reasons.items()]
        if self.first_skipped:
            lines.append(f"the first one: {self.first_skipped}")
        return "\n".join(lines)
