"""One training example as a model takes it: from a processor's output, or from messages through
the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import UnsupportedInput, in_short
from hf_packfree.models import compat
from hf_packfree.models.labels import IGNORED
from hf_packfree.models.media_checks import check_media_tensors
from hf_packfree.models.media_keywords import FEATURES, PIXELS, SECONDS, SIZES
from hf_packfree.packing.boundaries import integers_of
from hf_packfree.packing.foreign import FOREIGN

FLAT = (*PIXELS.values(), *PIXELS, *SECONDS)
"""Keywords whose items are concatenated along the first dimension, in a document and in a row."""

PADDED = (FEATURES["audio"], SIZES["audio"])
"""Keywords whose items are padded to the longest: [M, bins, frames] and [M, frames]."""

_SEVERAL: dict[str, Callable[[Tensor], bool]] = {
    "position_ids": lambda line: bool((line.diff() != 1).any()),
    "seq_idx": lambda line: bool((line.diff() != 0).any()),
    "cu_seq_lens_q": lambda line: len(line) > 2,
    "cu_seq_lens_k": lambda line: len(line) > 2,
    "seq_lengths": lambda line: len(line) > 1,
}
"""{column: whether its values show that documents were packed already}, as transformers and TRL
write them.
"""

_COLUMNS = {
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio"),
}
_PAYLOADS = ("image", "video", "audio", "image_url", "url", "path", "base64")


@dataclass(frozen=True, eq=False)
class Document:
    """One training example, on the host.

    Attributes:
        input_ids: int64 [n].
        labels: int64 [n]; -100 where no loss is wanted.
        media: the model's keywords of media, `pixel_values` and so on; items in reading order.
    """

    input_ids: Tensor
    labels: Tensor
    media: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.input_ids)


class Pack(list[Any]):
    """Examples that share a row, chosen by the lengths that the user gave.

    Args:
        examples: for the collator.
        max_length: the most tokens of all examples together.
    """

    def __init__(self, examples: Iterable[Any], max_length: int) -> None:
        super().__init__(examples)
        self.max_length = max_length

    def check(self, tokens: int) -> None:
        """Refuse a row that exceeds `max_length`, because the user's lengths were too small.

        Raises:
            UnsupportedInput: `tokens` is more than `max_length`.
        """
        if tokens > self.max_length:
            raise UnsupportedInput(
                f"found a pack of {tokens} tokens; wanted max_length={self.max_length} at most, as "
                "the lengths promised that PackedDataset got; pass those of this collator's "
                "documents: [len(collator.document(example)) for example in dataset]"
            )


def document_of(output: Mapping[str, Any], *, assistant_only: bool) -> Document:
    """Return the document that a processor's output for one text describes.

    Args:
        output: `input_ids` [n] or [1, n], tensors or lists; the media's keywords; `attention_mask`,
            whose zeros at either end are cut off; `labels`, which are kept; `assistant_masks`.
        assistant_only: set labels to -100 for tokens that the assistant did not write, by
            `assistant_masks`.

    Raises:
        UnsupportedInput: the output is of several texts or of none, of documents that are packed
            already, or has padding inside a document; tensors differ in length or hold no whole
            numbers; `completion_mask` comes without labels; or `assistant_masks` is missing with
            `assistant_only`.
        BoundaryError: media are of another kind than a processor's.
    """
    ids = _line("input_ids", output["input_ids"])
    _refuse_packs(output, len(ids))
    _refuse_unread_mask(output)
    labels = ids if output.get("labels") is None else _line("labels", output["labels"], ids)
    real = _real_tokens(output, ids)
    if assistant_only:
        labels = torch.where(_assistant_mask(output, ids), labels, IGNORED)
    given = {
        name: _tensor(name, output[name])
        for name in (*FLAT, *PADDED)
        if output.get(name) is not None
    }
    media = {name: value for name, value in given.items() if len(value)}
    check_media_tensors(media)
    if not bool(real.any()):
        raise UnsupportedInput(
            "found a document without a token; wanted one at least; leave empty examples out"
        )
    first, last = real.nonzero()[[0, -1], 0].tolist()
    if not bool(real[first:last].all()):
        hole = first + int((~real[first:last]).nonzero()[0])
        raise UnsupportedInput(
            f"found padding inside a document, at token {hole}; wanted it at the ends alone; take "
            "the tokens out, or set their labels to -100 if they are to be read and not learnt"
        )
    return Document(ids[real], labels[real].clone(), media)


def _real_tokens(output: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Return bool [n], False for padding, from a mask that has one value for all real tokens."""
    mask = output.get("attention_mask")
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    line = _line("attention_mask", mask, ids)
    values = sorted({*line.tolist(), 0})
    if len(values) > 2 or values[0] < 0:
        raise UnsupportedInput(
            f"found {in_brief(values)} in attention_mask: several documents, or an additive mask; "
            "wanted 1 for the tokens of one document and 0 for padding; pass the data set as it "
            "was before it was packed: this collator packs"
        )
    return line.bool()


def _refuse_packs(output: Mapping[str, Any], tokens: int) -> None:
    """Refuse an example of several packed documents: treated as one document, they would leak."""
    said = []
    for name, holds_several in _SEVERAL.items():
        if output.get(name) is not None:
            line = _tensor(name, output[name]).squeeze()
            # mRoPE positions, which have several rows, do not show documents; the collator
            # computes them anew
            said += [name] if line.ndim == 1 and holds_several(line) else []
    for ours in ("seq_idx", "position_ids", "cu_seq_lens_q"):
        for name in FOREIGN[ours]:
            found = integers_of(output.get(name))
            said += [name] if found is not None and _cuts(ours, found.squeeze(), tokens) else []
    if said:
        raise UnsupportedInput(
            f"found {said[0]} of several documents in one example; wanted one document in each; "
            "pass the data set as it was before it was packed: this collator packs"
        )


def _cuts(ours: str, line: Tensor, tokens: int) -> bool:
    """Whether another library's column cuts an example into documents; what does not fit its tokens
    is something else, such as the number of the example.
    """
    if line.ndim != 1 or len(line) < 2:
        return False
    if ours != "cu_seq_lens_q":
        return len(line) == tokens and _SEVERAL[ours](line)
    is_offsets = len(line) > 2 and line[0] == 0 and line[-1] == tokens
    is_lengths = line.min() > 0 and line.sum() == tokens
    return bool(is_offsets or is_lengths)


def _refuse_unread_mask(output: Mapping[str, Any]) -> None:
    """Refuse TRL's column of the tokens to train on where nothing has made labels of it."""
    if output.get("completion_mask") is not None and output.get("labels") is None:
        raise UnsupportedInput(
            "found completion_mask without labels, of which every token would be trained; wanted "
            "labels; pass the tokens where the mask is 1, and -100 elsewhere"
        )


def messages_of(example: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an example's `messages` with every content as a list of parts, and each part with its
    own media.

    Args:
        example: `messages`, as `apply_chat_template` takes them; media stand in the parts, or in a
            column of their own (`images` or `image`, `videos` or `video`, `audios` or `audio`),
            then in the order of the parts without any.

    Raises:
        UnsupportedInput: there are no messages, a part does not say what it is, or a column holds
            more or fewer items than parts wait for.
    """
    given = example["messages"]
    if not _is_list(given) or not given or not all(isinstance(one, Mapping) for one in given):
        raise UnsupportedInput(
            f"found messages={in_brief(given)}; wanted a list of one message at least, each a "
            "mapping with role and content; leave empty conversations out"
        )
    waiting = {kind: iter(_items(example, kind)) for kind in _COLUMNS}
    messages = [
        {**message, "content": _parts(message.get("content"), waiting)} for message in given
    ]
    for kind, items in waiting.items():
        left = len(list(items))
        if left:
            raise UnsupportedInput(
                f"found {left} {kind}s more than the messages have places for; wanted a part "
                f"{{'type': '{kind}'}} where each "
                "belongs; add them to the messages' content"
            )
    return messages


def check_assistant_mask(document: Document) -> None:
    """Refuse releases of transformers whose assistant mask ignores that a placeholder is expanded
    to many tokens.

    Raises:
        UnsupportedInput: the document has media, and transformers is too old.
    """
    if document.media and compat.MASKS_BEFORE_PLACEHOLDERS:
        raise UnsupportedInput(
            "found assistant_only_loss for a document with media and transformers "
            f"{compat.RELEASE}, whose mask is of the text before placeholders are repeated; wanted "
            "5.18 or later; install that, or pass labels of your own"
        )


def check_marks(document: Document, example: Mapping[str, Any]) -> None:
    """Refuse an assistant's messages of which no token has a label, since a document without a
    target trains nothing.

    Raises:
        UnsupportedInput: an assistant says something, and no token of the document is marked.
    """
    if "input_ids" in example or bool((document.labels != IGNORED).any()):
        return
    # an empty answer has no token to mark
    if any(one.get("role") == "assistant" and _says(one) for one in messages_of(example)):
        raise UnsupportedInput(
            "found messages of an assistant of which assistant_masks mark no token; wanted marks "
            "for assistant_only_loss, or nothing is learnt from them; put {% generation %} and "
            "{% endgeneration %} around what the assistant writes in the chat template"
        )


def _says(message: Mapping[str, Any]) -> bool:
    """Whether a message of `messages_of` has text."""
    return any(part.get("text") for part in message["content"])


def _line(name: str, value: Any, ids: Tensor | None = None) -> Tensor:
    """Return a processor's output for one text, [n] or [1, n], as [n]; refuse another length than
    that of `ids`.
    """
    given = _tensor(name, value)
    line = given.to(torch.int64)
    if bool((line != given).any()):
        wrong = given[line != given].flatten()[0].item()
        raise UnsupportedInput(
            f"found {wrong} in {name}; wanted whole numbers; pass what the tokenizer returned"
        )
    if line.ndim == 2 and line.shape[0] == 1:
        line = line[0]
    if line.ndim != 1:
        raise UnsupportedInput(
            f"found {name} of shape {list(line.shape)}; wanted one document, [n] or [1, n]; call "
            "the processor once for each"
        )
    if ids is not None and len(line) != len(ids):
        raise UnsupportedInput(
            f"found {len(line)} {name} for {len(ids)} input_ids; wanted one for each token; "
            "cut or extend both together"
        )
    return line


def _tensor(name: str, value: Any) -> Tensor:
    """Return a tensor [n, ...] on the host."""
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UnsupportedInput(
            f"found {name} that make no tensor ({in_short(error)}); wanted a tensor, or lists of "
            "numbers of one length; pass what the processor returned for this document"
        ) from error
    if tensor.ndim == 0:
        raise UnsupportedInput(
            f"found {name}={tensor.item()}; wanted a tensor [n, ...] or a list; pass what the "
            "processor returned for this document"
        )
    return tensor


def _assistant_mask(output: Mapping[str, Any], ids: Tensor) -> Tensor:
    mask = output.get("assistant_masks")
    if mask is None:
        raise UnsupportedInput(
            "found no assistant_masks with input_ids; wanted them for assistant_only_loss; call "
            "apply_chat_template(..., return_assistant_tokens_mask=True), or hand over the "
            "messages themselves"
        )
    return _line("assistant_masks", mask, ids).bool()


def _items(example: Mapping[str, Any], kind: str) -> Sequence[Any]:
    """Return the media items of one kind from an example's columns, such as `images`."""
    for column in _COLUMNS[kind]:
        value = example.get(column)
        if value is None:
            continue
        if not column.endswith("s"):
            return [value]
        if not _is_list(value):
            raise UnsupportedInput(
                f"found {column}={in_brief(value)}; wanted a list with one item for each part that "
                f"waits for it; pass [{column[:-1]}], or name the column {column[:-1]!r}"
            )
        return list(value)
    return []


def _is_list(value: Any) -> bool:
    """Whether a value counts as a list: any iterable but texts and mappings, which iterate over
    letters and names.
    """
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def check_whole(name: str, value: Any) -> int:
    """Return the value as int if it is a whole number of at least 1.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(
            f"found {name}={in_brief(value)}; wanted a whole number of at least 1; pass one"
        )
    return int(value)


def in_brief(value: Any) -> str:
    """Return a value's repr, shortened for an error message."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:60]}... ({type(value).__name__})"


def _parts(content: Any, waiting: Mapping[str, Iterator[Any]]) -> list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not _is_list(content) or not all(_says_what_it_is(part) for part in content):
        raise UnsupportedInput(
            f"found the content {in_brief(content)}; wanted a text, or a list of parts, each a "
            "mapping with its type: {'type': 'text', 'text': ...}, {'type': 'image'}; mend the "
            "message"
        )
    return [_filled(part, waiting) for part in content]


def _says_what_it_is(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str)


def _filled(part: Mapping[str, Any], waiting: Mapping[str, Iterator[Any]]) -> dict[str, Any]:
    """Return a message's part with its media item added; keys with None, which datasets add for the
    keys of other parts, are dropped.
    """
    given = {name: value for name, value in part.items() if value is not None}
    kind = given["type"]
    if kind not in waiting or any(name in given for name in _PAYLOADS):
        return given
    for item in waiting[kind]:
        return {**given, kind: item}
    raise UnsupportedInput(
        f"found a part {{'type': '{kind}'}} without its {kind}; wanted it in the part, or in the "
        f"column '{kind}s'; add it"
    )
