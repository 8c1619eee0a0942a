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

import torch
from transformers import PreTrainedModel

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


_OWN_HOOKS = "hooks that a copied model has to lose again, whose handles cannot be copied"
_HOOKS = "a module with hooks is called as it is"
PRIVATE = {
    "_is_fsdp_managed_module": Private(
        "torch 2.13", "FSDP1 has no hooks by which a CUDA graph could tell that it shards weights"
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": Private(
        "torch 2.13",
        "the wrapper with which accelerate and torchtitan recompute layers that FSDP2 shards",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    ),
    "_BUFFERS": Private(
        "fla-core 0.6.0",
        "buffers of KDA's backward pass in CUDA graphs, which nothing else frees",
        "fla.ops.utils.graph",
    ),
    "_experts_implementation": Private(
        "transformers 5.24", "a capture is tried again where experts run in another implementation"
    ),
    "_is_replica": Private(
        "torch 2.13", "replicas of nn.DataParallel, which run in threads, have no CUDA graphs"
    ),
    "_C": Private("torch 2.13", "the home of the names below", "torch"),
    "_are_functorch_transforms_active": Private(
        "torch 2.13", "torch.func is refused by name", "torch._C"
    ),
    "_current_level": Private(
        "torch 2.13",
        "forward-mode differentiation is refused by name",
        "torch.autograd.forward_ad",
    ),
    "_get_tracing_state": Private("torch 2.13", "torch.jit.trace is refused by name", "torch._C"),
    "_current_graph_task_id": Private(
        "torch 2.13",
        "layers that a backward pass runs again read the rounded weights of their row",
        "torch._C",
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
    "_foreach_copy_": Private(
        "torch 2.13", "a layer's gathered weights are copied by one kernel", "torch"
    ),
    "_version": Private("torch 2.13", "what was changed in place is noticed", "torch.Tensor"),
    "_modules": Private("torch 2.13", "modules are swapped and called by name", "torch.nn.Module"),
    "_parameters": Private(
        "torch 2.13",
        "weights are read past the module's own lookup, which is slow",
        "torch.nn.Module",
    ),
    "_buffers": Private(
        "torch 2.13", "weights of any kind but a plain one are not captured", "torch.nn.Module"
    ),
    "_forward_hooks": Private("torch 2.13", _HOOKS, "torch.nn.Module"),
    "_forward_pre_hooks": Private("torch 2.13", _HOOKS, "torch.nn.Module"),
    "_forward_pre_hooks_with_kwargs": Private("torch 2.13", _OWN_HOOKS, "torch.nn.Module"),
    "_forward_hooks_always_called": Private("torch 2.13", _OWN_HOOKS, "torch.nn.Module"),
    "_backward_hooks": Private("torch 2.13", _HOOKS, "torch.nn.Module"),
    "_backward_pre_hooks": Private("torch 2.13", _HOOKS, "torch.nn.Module"),
    "_has_any_global_hook": Private("torch 2.13", _HOOKS, "torch.nn.modules.module"),
    "_get_fsdp_state": Private(
        "torch 2.13",
        "the dtype that FSDP2 gathers weights in; no public name says it, and what a row computed "
        "in comes too late, is stale once a model is sharded, and is fp32 where residuals are",
        "torch.distributed.fsdp.FSDPModule",
    ),
    "_fsdp_param_group": Private(
        "torch 2.13",
        "a last layer's weights stay from its forward to the loss; a test on ranks fails",
    ),
    "_modules_to_run_forward": Private(
        "torch 2.13",
        "a last layer that is sharded with others runs alone after the model; a test on ranks fails",
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
    "_signature_columns": Private(
        "transformers 5.24", "columns that a Trainer keeps, which TRL's decide by themselves"
    ),
    "_tr_loss": Private(
        "transformers 5.24",
        "the mean that the Trainer logs in the place of a loss that is not finite; where it is "
        "elsewhere, the Trainer waits, which tests/models/test_host_waits.py sees",
    ),
    "_globalstep_last_logged": Private("transformers 5.24", "the same"),
    "_init_weights": Private(
        "transformers 5.24",
        "a new multi-token head begins as upstream's modules do",
        "transformers.PreTrainedModel",
    ),
    "_from_config": Private(
        "transformers 5.24",
        "a class that is none of the Auto classes draws weights where they will be",
        "transformers.PreTrainedModel",
    ),
    "_deepstack_process": Private(
        "transformers 5.24",
        "features between layers are added where the record counted them; ours is in front of it",
        "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel",
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

_FLASH_QLA = "flash_qla.ops.gated_delta_rule.chunk"
_SEGMENTS = "segments of long documents run in parts of its passes, which have no public names"
PRIVATE |= {
    "triton.runtime.driver": Private(
        "triton 3.9", "the cached launcher asks for the current stream", "triton.runtime"
    ),
    "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": Private(
        "mamba-ssm 2.3.2",
        "its scan, where nothing was compiled",
        "mamba_ssm.ops.triton.ssd_combined",
    ),
    "flash_qla.utils.index.prepare_varlen_metadata": Private(
        "flash-qla 0.1.3", "its own plan, where the release is not known", "flash_qla.utils.index"
    ),
    **{
        f"{home}.{name}": Private("flash-qla 0.1.3", _SEGMENTS, home)
        for home, name in (
            (_FLASH_QLA, "chunk_local_cumsum"),
            (_FLASH_QLA, "kkt_solve"),
            (_FLASH_QLA, "fused_gdr_fwd"),
            (_FLASH_QLA, "fused_gdr_dh"),
            (f"{_FLASH_QLA}.hopper.prepare_h", "tilelang_prepare_h"),
        )
    },
}
"""Those without an underscore are of modules that the package's own pages do not name."""

_PUBLIC_MODULES = re.compile(
    r"(triton(\.language)?|fla\.ops\.\w+|flash_qla|mamba_ssm|causal_conv1d)"
)
_KERNELS = ("triton", "fla", "flash_qla", "mamba_ssm", "causal_conv1d")
"""Packages of kernels, and their modules that everybody imports from."""

_ENDINGS = {"_features", "_grid_thw", "_start", "_token_id", "_start_token_id", "_start_token"}
_ENDINGS |= {"_bos_token", "_text"}
"""Strings that are ends of public names of transformers' configs and arguments."""


_PUBLIC_OR_OURS = {"_replace", "_upstream_loss"}
"""A documented method of named tuples, and a name that classes of ours promise each other."""


def touched() -> dict[str, set[str]]:
    """Return {private name: the files that touch it}."""
    found: dict[str, set[str]] = defaultdict(set)
    sources = {file: file.read_text() for file in HOUSE.rglob("*.py")}
    members = {name for source in sources.values() for name in _members(source)}
    members -= _REPLACED | {name for one in _OFTEN_READ for name in dir(one)}
    words = members | {name for source in sources.values() for name in _variables(source)}
    for file, source in sources.items():
        attributes = {*_attributes(source), *_imports(source)} - members
        strings = {*_strings(source)} - (words - _REPLACED) - _ENDINGS
        for name in (attributes | strings) - _PUBLIC_OR_OURS:
            found[name].add(str(file.relative_to(HOUSE)))
    return found


_REPLACED = {"_attn_implementation", "_cp_context", "_deepstack_process", "_prepare_cp"}
"""Names that we put something of ours under."""


_OFTEN_READ = (torch.nn.Module(), torch.Tensor, PreTrainedModel)
"""What has private names that a class of ours may have for something else: `_parameters`."""


def _members(source: str) -> Iterator[str]:
    """Yield what classes of ours define, and set on themselves."""
    for node in nodes(source):
        if isinstance(node, ast.ClassDef):
            yield from (one.name for one in node.body if isinstance(one, ast.FunctionDef))
            yield from (name for one in node.body for name in _targets(one))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def _targets(node: ast.AST) -> Iterator[str]:
    found = getattr(node, "targets", [getattr(node, "target", None)])
    yield from (one.id for one in found if isinstance(one, ast.Name))


def _variables(source: str) -> Iterator[str]:
    """Yield names of functions, classes and variables, which strings may have for other reasons."""
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _names(source: str) -> Iterator[str]:
    """Yield private attributes, modules, what is imported of them, and strings like these."""
    yield from (*_attributes(source), *_strings(source), *_imports(source))


def _attributes(source: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            yield node.attr


def _strings(source: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _PRIVATE.fullmatch(node.value):
                yield node.value


def _imports(source: str) -> Iterator[str]:
    for node in nodes(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported(node)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    home = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    if home.startswith("hf_packfree"):
        return
    if home.partition(".")[0] in _KERNELS and not _PUBLIC_MODULES.fullmatch(home):
        yield from (f"{home}.{one.name}" for one in node.names)
        return
    for name in [f"{home}.{one.name}" for one in node.names]:
        if any(_PRIVATE.fullmatch(part) for part in name.split(".")):
            yield home if any(_PRIVATE.fullmatch(part) for part in home.split(".")) else name
