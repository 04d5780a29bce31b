"""Shows which tokens of an example are trained on."""

import html
import io

import numpy as np
from rich.console import Console
from rich.text import Text

_TRAINED = "black on green"
_TRAINED_CSS, _PLAIN_CSS = "background:#2e9e5b;color:#fff", "background:rgba(128,128,128,.18)"
_VISIBLE = {"\n": "↵\n", "\t": "⇥\t"}


def show_tokens(example, tokenizer, row=0):
    """Shows an example's tokens, those in colour that are trained on: `print` it, or let a notebook display it.

    Line ends, tabs and characters that cannot be seen are written out; where nothing has a colour (in a file, say),
    what is trained on stands between ⟦ and ⟧.

    Args:
        example: dict of `token_ids` and `assistant_mask`, as `encode_chat` returns it, or a batch
            `(inputs, labels, loss_weights)` of a dataset, `pack` or `next_token_arrays`.
        tokenizer: `QwenTokenizer`.
        row: which row of a batch.

    Returns:
        A `TokenView`.

    Raises:
        ValueError: example is something else.

    Example:
        >>> print(kq.data.show_tokens(kq.data.encode_chat(tokenizer, messages), tokenizer))
        >>> kq.data.show_tokens(next(iter(dataset)), tokenizer, row=3)
    """
    if isinstance(example, tuple | list) and len(example) >= 3:
        return TokenView(_documents_of_row(*example[:3], row), tokenizer)
    if isinstance(example, dict) and {"token_ids", "assistant_mask"} <= example.keys():
        return TokenView([(list(example["token_ids"]), list(example["assistant_mask"]))], tokenizer)
    raise ValueError(
        "show_tokens takes what encode_chat returns, {'token_ids', 'assistant_mask'}, or a batch (inputs, labels, "
        f"loss_weights), not {type(example).__name__}"
    )


class TokenView:
    """Documents as coloured text.

    Args:
        documents: list of `(token_ids, mask)`.
        tokenizer: `QwenTokenizer`.
    """

    def __init__(self, documents, tokenizer):
        self._documents = [_pieces(tokenizer, ids, mask) for ids, mask in documents]
        trained = sum(bool(on) for _, mask in documents for on in mask)
        self._summary = f"{trained} of {sum(len(ids) for ids, _ in documents)} tokens are trained on"

    def __rich__(self):
        text = Text()
        for number, pieces in enumerate(self._documents, start=1):
            if len(self._documents) > 1:
                text.append(f"— document {number} —\n", style="bold")
            for place, (piece, trained) in enumerate(pieces):
                style = _TRAINED if trained else ""
                text.append(piece, style=f"{style} underline" if place % 2 else style)  # tokens can be told apart
            text.append("\n")
        return text.append(self._summary, style="bold")

    def __str__(self):
        console = Console()
        if console.is_terminal:
            out = Console(file=io.StringIO(), force_terminal=True, width=console.width)
            out.print(self, end="")
            return out.file.getvalue()
        lines = []
        for pieces in self._documents:
            marked, before = "", False
            for piece, trained in [*pieces, ("", False)]:
                marked += "⟦" * (trained and not before) + "⟧" * (before and not trained) + piece
                before = trained
            lines.append(marked)
        return "\n".join([*lines, self._summary])

    __repr__ = __str__

    def _repr_html_(self):
        parts = []
        for pieces in self._documents:
            spans = "".join(
                f'<span style="{_TRAINED_CSS if trained else _PLAIN_CSS};border-left:1px solid rgba(128,128,128,.6)">'
                f"{html.escape(piece)}</span>"
                for piece, trained in pieces
            )
            parts.append(f'<pre style="white-space:pre-wrap;line-height:1.5">{spans}</pre>')
        return "".join(parts) + f"<p>{self._summary}</p>"


def _documents_of_row(inputs, labels, loss_weights, row):
    """Undo the shift: a document's ids, and whether each of them is trained on, as a label."""
    segments = np.asarray(inputs.get("segment_ids", inputs.get("padding_mask")))[row]
    ids, labels, weights = (np.asarray(array)[row] for array in (inputs["token_ids"], labels, loss_weights))
    documents = []
    for segment in range(1, int(segments.max(initial=0)) + 1):
        here = segments == segment
        documents.append(([*ids[here].tolist(), int(labels[here][-1])], [False, *(weights[here] > 0).tolist()]))
    return documents


def _pieces(tokenizer, ids, mask):
    """Text of each token; tokens that are parts of one character stand together."""
    pieces, held = [], []
    for place, (token, on) in enumerate(zip(ids, mask, strict=True)):
        held.append(int(token))
        text = tokenizer.decode(held)
        last = place + 1 == len(ids) or bool(mask[place + 1]) != bool(on)
        if "\ufffd" in text and len(held) < 4 and not last:
            continue
        pieces.append(("".join(map(_visible, text)), bool(on)))
        held = []
    return pieces


def _visible(character):
    if character in _VISIBLE:
        return _VISIBLE[character]
    return character if character.isprintable() else character.encode("unicode_escape").decode()
