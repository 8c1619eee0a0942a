"""Which heads an installed transformers has around a family's text model, and what stands in for each."""

from __future__ import annotations

from typing import Any

from hf_packfree.models.classifiers import SequenceHead, SpanHead, TokenHead
from hf_packfree.models.heads import Head, PackedHead
from hf_packfree.models.replacement import stands_for

_KINDS: dict[str, type[Head]] = {
    "ForCausalLM": PackedHead,
    "ForConditionalGeneration": PackedHead,
    "ForSequenceClassification": SequenceHead,
    "ForTokenClassification": TokenHead,
}


def heads_of(upstream: Any, home: str) -> dict[str, type[Head]]:
    """Return {name: our class} for every head of the modeling module `upstream`.

    Releases have different ones, so the classes are made here instead of written in the family's file `home`, where
    pickling finds them.  A head of a kind not known keeps its padding.
    """
    names = [name for name in upstream.__all__ if "For" in name]
    return {name: _stand_in(name, upstream, home) for name in names}


def _stand_in(name: str, upstream: Any, home: str) -> type[Head]:
    kind = next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), SpanHead)
    cls: type[Head] = type(name, (kind, getattr(upstream, name)), {"__module__": home, "__doc__": kind.__doc__})
    return stands_for(upstream)(cls)
