"""Every private name of another package that the code touches, with its reason and the release that
it was seen in; `tests/test_private_names.py` holds the list equal to the code.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hf_packfree
from tests.source import nodes

HOUSE = Path(hf_packfree.__file__).parent
_PRIVATE = re.compile(r"_[A-Za-z]\w*")


@dataclass(frozen=True)
class Private:
    """One name.

    Attributes:
        seen: the package and the release it was seen in.
        why: what it is touched for.
        home: where it is found in that package: a module, a class, or an instance that the test can
            make; None: on objects that only a running model has.
    """

    seen: str
    why: str
    home: str | None = None


_HOOKS = "a module with hooks is called as it is"
PRIVATE = {
    "_C": Private("torch 2.13", "the home of the names below", "torch"),
    "_are_functorch_transforms_active": Private(
        "torch 2.13", "torch.func is refused by name", "torch._C"
    ),
    "_autograd": Private("torch 2.13", "the home of the names below", "torch._C"),
    "_top_saved_tensors_default_hooks": Private(
        "torch 2.13", "what is offloaded is not computed again", "torch._C._autograd"
    ),
    "_saved_tensors_hooks_is_enabled": Private(
        "torch 2.13", "where hooks are forbidden, nothing is computed again", "torch._C._autograd"
    ),
    "_disabled_torch_function_impl": Private(
        "torch 2.13", "lazy logits dispatch below __torch_function__ alone", "torch._C"
    ),
    "_set_throw_on_mutable_data_ptr": Private(
        "torch 2.13", "lazy logits have no memory that a pointer could name", "torch._C"
    ),
    "_make_wrapper_subclass": Private(
        "torch 2.13", "the documented way to make a tensor without memory", "torch.Tensor"
    ),
    "_schema": Private(
        "torch 2.13", "which operators write into lazy logits", "torch.ops.aten.add_.Tensor"
    ),
    "_to_copy": Private("torch 2.13", "lazy logits change dtype without being made"),
    "_version": Private("torch 2.13", "what was changed in place is noticed", "torch.Tensor"),
    "_modules": Private("torch 2.13", "modules are swapped and called by name", "torch.nn.Module"),
    "_forward_hooks": Private("torch 2.13", _HOOKS, "torch.nn.Module"),
    "_forward_pre_hooks": Private("torch 2.13", _HOOKS, "torch.nn.Module"),
    "_backward_hooks": Private("torch 2.13", _HOOKS, "torch.nn.Module"),
    "_backward_pre_hooks": Private("torch 2.13", _HOOKS, "torch.nn.Module"),
    "_has_any_global_hook": Private("torch 2.13", _HOOKS, "torch.nn.modules.module"),
    "_get_fsdp_state": Private(
        "torch 2.13",
        "the dtype that FSDP2 gathers weights in; no public name says it, and what a row computed "
        "in comes too late, is stale once a model is sharded, and is fp32 where residuals are",
        "torch.distributed.fsdp.FSDPModule",
    ),
    "_mp_policy": Private("torch 2.13", "the same; what it says is tested beside what runs"),
    "_compiled_call_impl": Private(
        "torch 2.13",
        "the bits of compiled modules are not promised, and their layers are not fused",
        "torch.nn.Module",
    ),
    "torch.utils._pytree": Private(
        "torch 2.13", "tensors inside any output; torch tells users of it, too", "torch.utils"
    ),
    "_attn_implementation": Private(
        "transformers 5.24",
        "which attention a model was loaded with; no public name says it",
        "transformers.PretrainedConfig()",
    ),
    "_gradient_checkpointing_func": Private(
        "transformers 5.24",
        "the multi-token head is recomputed as the model's layers are, in CUDA graphs, too",
    ),
    "_init_weights": Private(
        "transformers 5.24",
        "a new multi-token head begins as upstream's modules do",
        "transformers.PreTrainedModel",
    ),
    "_model_mapping": Private(
        "transformers 5.24",
        "which Auto class holds a config",
        "transformers.AutoModelForCausalLM",
    ),
    "_fused_forward": Private(
        "trl 1.16", "TRL's fused head is known by its forward, and asked by ours"
    ),
    "_hf_hook": Private("accelerate 1.15", "accelerate's hooks call the class's forward"),
    "_original_forward": Private("accelerate 1.15", "the forward that mixed precision wraps"),
    "_attach_context_parallel_hooks": Private(
        "accelerate 1.15",
        "its hook drops masks and cuts rows, which ours have to replace",
        "accelerate.big_modeling",
    ),
    "_prepare_cp": Private(
        "accelerate 1.15", "where models are prepared to cut rows", "accelerate.Accelerator"
    ),
    "_cp_context": Private("accelerate 1.15", "what cuts rows in a step"),
    "_flash_qla_prepared_varlen": Private(
        "flash-qla 0.1.3", "its plan of a row is made once for all layers"
    ),
}

_ENDINGS = {"_features", "_grid_thw", "_start", "_token_id", "_start_token_id", "_start_token"}
_ENDINGS |= {"_bos_token", "_text"}
"""Strings that are ends of public names of transformers' configs and arguments."""


_PUBLIC_OR_OURS = {"_replace", "_upstream_loss"}
"""A documented method of named tuples, and a name that classes of ours promise each other."""


def touched() -> dict[str, set[str]]:
    """Return {private name: the files that touch it}."""
    found: dict[str, set[str]] = defaultdict(set)
    sources = {file: file.read_text() for file in HOUSE.rglob("*.py")}
    ours = {name for source in sources.values() for name in _defined(source)} - _REPLACED
    known = ours | _ENDINGS | _PUBLIC_OR_OURS
    for file, source in sources.items():
        for name in {*_names(source)} - known:
            found[name].add(str(file.relative_to(HOUSE)))
    return found


_REPLACED = {"_attn_implementation", "_cp_context", "_prepare_cp"}
"""Names that we put something of ours under."""


def _defined(source: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def _names(source: str) -> Iterator[str]:
    """Yield private attributes, modules, what is imported of them, and strings like these."""
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _PRIVATE.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported(node)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    home = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    if home.startswith("hf_packfree"):
        return
    for name in [f"{home}.{one.name}" for one in node.names]:
        if any(_PRIVATE.fullmatch(part) for part in name.split(".")):
            yield home if any(_PRIVATE.fullmatch(part) for part in home.split(".")) else name
